"""Whole training steps and inference under amphal, torch.amp by hand, Accelerate and Fabric.

    python benchmarks/steps.py [--device cpu] [--rounds 21] [--only TEXT] [--json PATH] [--check]

Each has its own copy of the model and a fused AdamW, and they take turns round by round; a ratio
is the median over the rounds of amphal's time to theirs in the same round. Needs the extra
``amphal[bench]``.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _models import WORKLOADS, Workload
from _timing import in_turn, median, ratio, sized, waiter

import amphal

BOUNDS = {"torch.amp": 1.01, "Accelerate": 1.00, "Fabric": 1.00}
"""The most that a training step may cost, as a part of each peer's time."""
PRECISIONS = ("fp32", "bf16", "fp16")


class Run:
    """A model, an optimizer and a batch, all of one seed: what every way starts from."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = work.build().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.inputs, self.target = (t.to(device) for t in work.batch())
        self.loss = work.loss


Step = Callable[[], object]
Made = tuple[Step, Step]
"""One training step, and one forward pass without gradients."""


def by_torch(run: Run, plan: amphal.Plan) -> Made:
    model, optimizer, device = run.model, run.optimizer, plan.device.type
    low = plan.dtype is not torch.float32
    dtype = plan.dtype if low else None
    scaler = torch.amp.GradScaler(device, enabled=plan.use_scaler)

    def train() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype, enabled=low):
            loss = run.loss(model(run.inputs), run.target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def infer() -> Any:
        with torch.no_grad(), torch.autocast(device, dtype, enabled=low):
            return model(run.inputs)

    return train, infer


def by_amphal(run: Run, plan: amphal.Plan) -> Made:
    model, optimizer = run.model, run.optimizer
    scaler = amphal.GradScaler(plan)

    def train() -> None:
        optimizer.zero_grad()
        with amphal.autocast(plan):
            loss = run.loss(model(run.inputs), run.target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def infer() -> Any:
        with torch.no_grad(), amphal.autocast(plan):
            return model(run.inputs)

    return train, infer


def by_accelerate(run: Run, plan: amphal.Plan) -> Made:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "no"}
    accelerator = Accelerator(mixed_precision=names[plan.dtype], cpu=plan.device.type == "cpu")
    model, optimizer = accelerator.prepare(run.model, run.optimizer)

    def train() -> None:
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = run.loss(model(run.inputs), run.target)
        accelerator.backward(loss)
        optimizer.step()

    def infer() -> Any:
        with torch.no_grad():
            return model(run.inputs)

    return train, infer


def by_fabric(run: Run, plan: amphal.Plan) -> Made:
    from lightning.fabric import Fabric

    names = {torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed", torch.float32: "32-true"}
    logging.getLogger("lightning").setLevel(logging.WARNING)
    fabric = Fabric(accelerator=plan.device.type, devices=1, precision=names[plan.dtype])
    model, optimizer = fabric.setup(run.model, run.optimizer)

    def train() -> None:
        optimizer.zero_grad()
        with fabric.autocast():
            loss = run.loss(model(run.inputs), run.target)
        fabric.backward(loss)
        optimizer.step()

    def infer() -> Any:
        with torch.no_grad():
            return model(run.inputs)

    return train, infer


WAYS: dict[str, Callable[[Run, amphal.Plan], Made]] = {
    "amphal": by_amphal,
    "torch.amp": by_torch,
    "Accelerate": by_accelerate,
    "Fabric": by_fabric,
}


def ways_for(plan: amphal.Plan) -> list[str]:
    """On a CPU Accelerate takes fp16 for fp32, and Fabric for bf16: there is nothing to compare."""
    fp16_on_cpu = plan.device.type == "cpu" and plan.dtype is torch.float16
    return [name for name in WAYS if not (fp16_on_cpu and name in ("Accelerate", "Fabric"))]


def cell(work: Workload, plan: amphal.Plan, rounds: int) -> dict[str, Any]:
    """The figures of one workload in one precision."""
    made = {name: WAYS[name](Run(work, plan.device), plan) for name in ways_for(plan)}
    wait = waiter(plan.device)
    found: dict[str, Any] = {"workload": work.name, "precision": str(plan.dtype).split(".")[1]}
    for i, what in enumerate(("training", "inference")):
        steps = {name: both[i] for name, both in made.items()}
        calls, turns = sized(steps["torch.amp"], rounds, len(steps))
        times = in_turn(steps, turns, calls=calls, wait=wait)
        found[what] = {
            "rounds": turns,
            "amphal_ms": median(times, "amphal") * 1e3,
            "ratios": {name: ratio(times, "amphal", name) for name in steps if name != "amphal"},
        }
    return found


def measure(device: str | None = None, rounds: int = 21, only: str = "") -> list[dict[str, Any]]:
    """Every workload in every precision."""
    warnings.simplefilter("ignore", amphal.PrecisionWarning)
    return [
        cell(work, amphal.detect(device, precision=precision), rounds)
        for work in WORKLOADS.values()
        if only in work.name
        for precision in PRECISIONS
    ]


def failures(figures: list[dict[str, Any]]) -> list[str]:
    return [
        f"{row['workload']}, {row['precision']}: {value:.3f} x {peer}, the bound is {BOUNDS[peer]}"
        for row in figures
        for peer, value in row["training"]["ratios"].items()
        if value > BOUNDS[peer]
    ]


def show(figures: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    for what in ("training", "inference"):
        peers = [f"/ {name}" for name in BOUNDS]
        table = Table("workload", "precision", "amphal ms", *peers, title=f"{what}, one step")
        for row in figures:
            found = row[what]
            ratios = [f"{found['ratios'][p]:.3f}" if p in found["ratios"] else "" for p in BOUNDS]
            table.add_row(row["workload"], row["precision"], f"{found['amphal_ms']:.3f}", *ratios)
        Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole steps beside torch.amp and frameworks.")
    parser.add_argument("--device", help="the device; detect() chooses without it")
    parser.add_argument("--rounds", type=int, default=21, help="interleaved rounds a figure")
    parser.add_argument("--only", default="", help="workloads whose name has this in it")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="fail where a bound is passed")
    args = parser.parse_args()
    figures = measure(args.device, args.rounds, args.only)
    show(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if args.check and (missed := failures(figures)):
        raise SystemExit("\n".join(missed))


if __name__ == "__main__":
    main()
