"""Does amphal.tune() choose well? Four workloads, each measured again without it.

    python benchmarks/tune.py [--budget 10] [--seconds 20] [--json PATH] [--check]

For each workload tune() chooses within its budget. Then every candidate is timed by turns, for
longer and by code of its own, and the time of tune()'s choice is divided by the best one's; so is
that of detect(), which measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import amphal
from gpt import GPT

LIMIT = 1.05
"""The most that tune()'s choice may take, as a multiple of the best candidate's time."""

Step = Callable[[amphal.Plan, amphal.GradScaler], torch.Tensor]


def training(model: nn.Module, loss_of: Callable[[], torch.Tensor], plan: amphal.Plan) -> Step:
    """A training step of ``model``; ``loss_of`` draws a batch, so that nothing is learnt by heart.

    A loss that reaches 0 leaves gradients too small for normal floats, which CPUs are slow with.
    """
    fused = plan.fused_optimizers
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def step(plan: amphal.Plan, scaler: amphal.GradScaler) -> torch.Tensor:
        optimizer.zero_grad()
        with plan.autocast():
            loss = loss_of()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def gpt_training(plan: amphal.Plan) -> Step:
    model = GPT(384, 4, 128).to(plan.device)

    def loss_of() -> torch.Tensor:
        tokens = torch.randint(256, (8, 129), device=plan.device)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return training(model, loss_of, plan)


def one_token(plan: amphal.Plan) -> Step:
    """A row of one through every matrix of a GPT, as decoding with a cache does."""
    model = GPT(512, 4, 8).to(plan.device).eval()
    token = torch.randint(256, (1, 1), device=plan.device)

    def step(plan: amphal.Plan, scaler: amphal.GradScaler) -> torch.Tensor:
        with torch.no_grad(), plan.autocast():
            return model(token)

    return step


def convnet(plan: amphal.Plan) -> Step:
    layers: list[nn.Module] = []
    for old, new in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(old, new, 3, stride=2, padding=1), nn.BatchNorm2d(new), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    model = model.to(plan.device)
    images = torch.randn(16, 32, 3, 64, 64, device=plan.device)

    def loss_of() -> torch.Tensor:
        labels = torch.randint(10, (32,), device=plan.device)
        return F.cross_entropy(model(images[int(torch.randint(16, ()))]), labels)

    return training(model, loss_of, plan)


def tiny_batch(plan: amphal.Plan) -> Step:
    sizes = (64, 256, 256, 1)
    layers: list[nn.Module] = []
    for old, new in itertools.pairwise(sizes):
        layers += [nn.Linear(old, new), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).to(plan.device)

    def loss_of() -> torch.Tensor:
        x, y = torch.randn(4, 64, device=plan.device), torch.randn(4, 1, device=plan.device)
        return F.mse_loss(model(x), y)

    return training(model, loss_of, plan)


WORKLOADS: dict[str, Callable[[amphal.Plan], Step]] = {
    "GPT training, 8 x 128 tokens": gpt_training,
    "GPT, one token": one_token,
    "convnet training, 32 x 64 x 64": convnet,
    "MLP training, 4 rows": tiny_batch,
}


def independent(
    step: Step, plans: dict[str, amphal.Plan], wait: Callable[[], None], seconds: float
) -> dict[str, float]:
    """The median seconds of a step under each plan, by turns; not by tune()'s code.

    Whatever is 20 times slower than the fastest in its fifth step is left out after that.
    """
    scalers = {name: plan.grad_scaler() for name, plan in plans.items()}

    def timed(name: str, repeats: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            step(plans[name], scalers[name])
        wait()
        return (time.perf_counter() - start) / repeats

    times: dict[str, list[float]] = {name: [] for name in plans}
    repeats = {}
    for name, plan in plans.items():
        with plan.matmul():
            timed(name, 4)
            times[name].append(timed(name, 1))
            repeats[name] = max(1, math.ceil(0.01 / times[name][0]))
    best = min(t[0] for t in times.values())
    racing = [name for name, t in times.items() if t[0] < 20 * best]
    for name in racing:
        times[name].clear()
    order, end = random.Random(1), time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[racing[0]]) < 5:
        for name in order.sample(racing, len(racing)):
            with plans[name].matmul():
                timed(name, 1)
                times[name].append(timed(name, repeats[name]))
    return {name: statistics.median(t) for name, t in times.items()}


def plan_named(name: str, base: amphal.Plan) -> amphal.Plan:
    """The plan that a candidate of this name is."""
    matmul = "high" if name == "tf32" else name.partition(":")[2] or None
    short = "fp32" if name == "tf32" else name.partition(":")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        plan = amphal.detect(base.device, precision=short)
    return dataclasses.replace(plan, matmul_precision=matmul)


def measure(name: str, budget: float, seconds: float) -> dict[str, Any]:
    """tune()'s choice for one workload, and what all candidates take."""
    torch.manual_seed(0)
    base = amphal.detect()
    step = WORKLOADS[name](base)
    backend = amphal.contract.get_backend(base.hardware.device_type)
    start = time.perf_counter()
    chosen = amphal.tune(step, budget_s=budget)
    took = time.perf_counter() - start
    rows = chosen.measured or ()
    plans = {row.candidate: plan_named(row.candidate, base) for row in rows}
    times = independent(step, plans, backend.synchronize or (lambda: None), seconds)
    same = (chosen.dtype, chosen.matmul_precision)
    choice = next(n for n, p in plans.items() if (p.dtype, p.matmul_precision) == same)
    guess = next(n for n, p in plans.items() if p.dtype is base.dtype and not p.matmul_precision)
    # A candidate that is not close enough in its results is none that could have been chosen.
    wrong = {row.candidate for row in rows if row.dropped and "off the reference" in row.note}
    best = min((n for n in times if n not in wrong), key=lambda n: times[n])
    return {
        "workload": name,
        "tune": choice,
        "detect": guess,
        "best": best,
        "tune_over_best": times[choice] / times[best],
        "detect_over_best": times[guess] / times[best],
        "tune_seconds": took,
        "step_seconds": times,
        "rows": [row.to_dict() for row in rows],
    }


def show(figures: list[dict[str, Any]]) -> None:
    """The figures as a person reads them."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"amphal.tune() on {amphal.detect().hardware.name}, torch {torch.__version__}"
    )
    for column in ("workload", "ms a step", "best", "tune()", "/ best", "detect()", "/ best"):
        table.add_column(column, justify="right" if column == "/ best" else "left")
    for f in figures:
        times = ", ".join(f"{n} {t * 1e3:.3g}" for n, t in f["step_seconds"].items())
        table.add_row(
            f["workload"],
            times,
            f["best"],
            f["tune"],
            f"{f['tune_over_best']:.3f}",
            f["detect"],
            f"{f['detect_over_best']:.3f}",
        )
    Console().print(table)
    for f in figures:
        print(f"{f['workload']}: tune() took {f['tune_seconds']:.1f} s")
        for row in f["rows"]:
            if row["note"]:
                print(f"  {row['candidate']}: {row['note']}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Choices of amphal.tune() against the best.")
    parser.add_argument("--budget", type=float, default=10, help="seconds for tune()")
    parser.add_argument("--seconds", type=float, default=20, help="seconds to measure again")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--only", help="workloads whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help=f"fail above {LIMIT} x the best")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    names = [name for name in WORKLOADS if not args.only or args.only in name]
    figures = [measure(name, args.budget, args.seconds) for name in names]
    show(figures)
    if args.json:
        rows: dict[str, Any] = {
            "torch": torch.__version__,
            "hardware": amphal.detect().hardware.to_dict(),
        }
        rows |= {"threads": torch.get_num_threads(), "figures": figures}
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    slow = [f["workload"] for f in figures if f["tune_over_best"] > LIMIT]
    if args.check and slow:
        raise SystemExit(f"slower than {LIMIT} x the best: {', '.join(slow)}")


if __name__ == "__main__":
    main()
