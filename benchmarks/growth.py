"""How the costs grow with the number of parameters and of tensors, and how steeply.

    python benchmarks/growth.py [--device cpu] [--largest 100000000] [--rounds 9] [--json PATH]

Three costs, each beside torch's own in the same run: a region with the casts of its weights; the
scaler's part of a step (scale, unscale, clip, update); the whole step of a model of linear layers.
The exponent is that of the power law fitted to the times, and ``steepest`` the largest between two
neighbours: 1 is linear growth. Where the machine leaves a cache, torch's is above 1 as well.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _timing import in_turn, median, ratio, sized, waiter
from torch import Tensor, nn

import amphal

PARAMETERS = [10**k for k in range(3, 9)]
TENSORS = [10, 100, 1_000, 10_000]
AT_TENSORS, AT_PARAMETERS = 10, 1_000_000
"""What is held while the other grows."""

Pair = dict[str, Callable[[], object]]


def squares(numel: int, tensors: int, device: torch.device) -> list[Tensor]:
    """``tensors`` square matrices of about ``numel`` numbers together."""
    side = max(1, math.isqrt(numel // tensors))
    return [torch.randn(side, side, device=device) / side for _ in range(tensors)]


def regions(weights: list[Tensor], plan: amphal.Plan) -> Pair:
    """A region in which each weight is cast once, and what it has cast is let go at its end."""
    parameters = [nn.Parameter(weight) for weight in weights]
    row = torch.ones(1, weights[0].shape[0], device=weights[0].device, dtype=plan.dtype)

    def use() -> None:
        for weight in parameters:
            torch.mm(row, weight)

    def by_torch() -> None:
        with torch.autocast(plan.device.type, plan.dtype):
            use()

    def by_amphal() -> None:
        with amphal.autocast(plan):
            use()

    return {"torch": by_torch, "amphal": by_amphal}


def scalers(weights: list[Tensor], plan: amphal.Plan) -> Pair:
    """The scaler's part of a step: an optimizer that does nothing."""

    class Idle(torch.optim.Optimizer):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> Any:
            pass

    device = weights[0].device

    def side(scaler: torch.amp.GradScaler, ours: bool) -> Callable[[], None]:
        parameters = [nn.Parameter(weight) for weight in weights]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = Idle(parameters)
        loss = torch.ones((), device=device)

        def run() -> None:
            scaler.scale(loss)
            if ours:
                scaler.clip_grad_norm_(optimizer, 1.0)  # type: ignore[attr-defined]
            else:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()

        return run

    # A scale of 1 that stays, so that the gradients keep their size from round to round.
    settings: dict[str, Any] = {"init_scale": 1.0, "growth_interval": 2**30}
    return {
        "torch": side(torch.amp.GradScaler(device.type, **settings), ours=False),
        "amphal": side(amphal.GradScaler(plan.device, enabled=True, **settings), ours=True),
    }


def steps(weights: list[Tensor], plan: amphal.Plan) -> Pair:
    """A training step of a chain of linear layers on one row, with a fused SGD and the scaler."""

    def side(ours: bool) -> Callable[[], None]:
        layers = [nn.Parameter(weight.clone()) for weight in weights]
        optimizer = torch.optim.SGD(layers, lr=1e-6, fused=True)
        device = plan.device.type
        scaler = (
            amphal.GradScaler(plan.device, enabled=True)
            if ours
            else torch.amp.GradScaler(device, enabled=True)
        )
        row = torch.ones(1, weights[0].shape[0], device=weights[0].device)

        def run() -> None:
            optimizer.zero_grad()
            with amphal.autocast(plan) if ours else torch.autocast(device, plan.dtype):
                x = row
                for layer in layers:
                    x = torch.mm(x, layer)
                loss = x.float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return run

    return {"torch": side(ours=False), "amphal": side(ours=True)}


COSTS = {
    "region with its casts": regions,
    "scaler: unscale, clip, update": scalers,
    "whole step": steps,
}


def exponent(sizes: list[int], times: list[float]) -> float:
    """The slope of log(time) over log(size), by least squares."""
    xs, ys = [math.log(s) for s in sizes], [math.log(t) for t in times]
    return statistics.linear_regression(xs, ys).slope


def steepest(sizes: list[int], times: list[float]) -> float:
    """The largest slope between neighbours; leaving a cache of the machine shows here."""
    pairs = zip(
        zip(sizes, times, strict=True), zip(sizes[1:], times[1:], strict=True), strict=False
    )
    return max(math.log(t2 / t1) / math.log(s2 / s1) for (s1, t1), (s2, t2) in pairs)


def grow(
    sizes: list[tuple[int, int]], plan: amphal.Plan, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Every cost at each (parameters, tensors)."""
    wait = waiter(plan.device)
    found: dict[str, list[dict[str, float]]] = {}
    for name, cost in COSTS.items():
        rows = found[name] = []
        for numel, tensors in sizes:
            pair = cost(squares(numel, tensors, plan.device), plan)
            calls, turns = sized(pair["torch"], rounds, 2)
            times = in_turn(pair, turns, calls=calls, wait=wait)
            rows.append(
                {
                    "parameters": numel,
                    "tensors": tensors,
                    "torch_us": median(times, "torch") * 1e6,
                    "amphal_us": median(times, "amphal") * 1e6,
                    "ratio": ratio(times, "amphal", "torch"),
                }
            )
    return found


def measure(
    device: str | None = None, largest: int = PARAMETERS[-1], rounds: int = 9
) -> dict[str, Any]:
    """The tables and exponents: over parameters, over tensors."""
    warnings.simplefilter("ignore", amphal.PrecisionWarning)
    plan = amphal.detect(device, precision="bf16")
    series = {
        "parameters": [(n, AT_TENSORS) for n in PARAMETERS if n <= largest],
        "tensors": [(AT_PARAMETERS, n) for n in TENSORS],
    }
    found: dict[str, Any] = {}
    for growing, sizes in series.items():
        tables = grow(sizes, plan, rounds)
        found[growing] = {}
        for name, rows in tables.items():
            at = [int(row[growing]) for row in rows]
            took = {who: [row[f"{who}_us"] for row in rows] for who in ("torch", "amphal")}
            found[growing][name] = {
                "rows": rows,
                "exponent": {who: exponent(at, times) for who, times in took.items()},
                "steepest": {who: steepest(at, times) for who, times in took.items()},
            }
    return found


def show(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    held = {
        "parameters": f"in {AT_TENSORS} tensors",
        "tensors": f"of {AT_PARAMETERS:,} parameters together",
    }
    for growing, costs in figures.items():
        table = Table("cost", growing, "torch us", "amphal us", "ratio")
        table.title = f"growth with the {growing}, {held[growing]}"
        for name, found in costs.items():
            for row in found["rows"]:
                times = (f"{row[k]:,.1f}" for k in ("torch_us", "amphal_us"))
                table.add_row(name, f"{row[growing]:,}", *times, f"{row['ratio']:.3f}")
            for slope in ("exponent", "steepest"):
                slopes = (f"{found[slope][who]:.2f}" for who in ("torch", "amphal"))
                table.add_row(name, slope, *slopes, end_section=slope == "steepest", style="bold")
        Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="How the costs grow.")
    parser.add_argument("--device", help="the device; detect() chooses without it")
    parser.add_argument("--largest", type=int, default=PARAMETERS[-1], help="most parameters")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds a figure")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    figures = measure(args.device, args.largest, args.rounds)
    show(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
