"""What amphal's gradient scaler costs beside torch's, on any device.

    python benchmarks/scaler.py [--device cpu] [--rounds 30] [--json PATH] [--check]

Every figure is a ratio taken in one run: the two scalers take turns, iteration by iteration, on
their own copies of the parameters, and the medians are compared. Host syncs are counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import amphal

LIMITS = {"clip": 0.70, "plain": 1.00}
"""The most that a fused AdamW on the large model may cost, as a part of torch's time."""


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    optimizer: str
    fused: bool
    clip: bool
    tensors: int
    numel: int


@dataclass
class Figure:
    """Milliseconds an iteration, their ratio, and host syncs an iteration."""

    case: Case
    torch_ms: float
    amphal_ms: float
    ratio: float
    torch_syncs: float
    amphal_syncs: float


class Side:
    """A scaler with its own parameters, optimizer and gradients."""

    def __init__(self, case: Case, device: torch.device, scaler: torch.amp.GradScaler) -> None:
        generator = torch.Generator().manual_seed(0)
        draws = [torch.randn(case.numel, generator=generator) for _ in range(case.tensors)]
        self.scaler, self.case = scaler, case
        self.params = [torch.nn.Parameter(draw.to(device)) for draw in draws]
        self.grads = [(draw * 65536).to(device) for draw in draws]
        kind = getattr(torch.optim, case.optimizer)
        self.optimizer = kind(self.params, lr=1e-4, fused=case.fused)
        self.loss = torch.ones((), device=device)

    def refill(self) -> None:
        """Scaled gradients as a backward pass leaves them; not timed."""
        for param, grad in zip(self.params, self.grads, strict=True):
            if param.grad is None:
                param.grad = grad.clone()
            else:
                param.grad.copy_(grad)

    def iterate(self) -> None:
        """What is timed: all that a training loop asks of a scaler and an optimizer."""
        scaler: Any = self.scaler
        scaler.scale(self.loss)
        if self.case.clip:
            if isinstance(scaler, amphal.GradScaler):
                scaler.clip_grad_norm_(self.optimizer, 1.0)
            else:
                scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        scaler.step(self.optimizer)
        scaler.update()

    def step(self) -> None:
        """The bare optimizer, whose own syncs are not the scaler's."""
        self.optimizer.step()


class Syncs(TorchDispatchMode):
    """Counts reads of a device's scalar by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def syncs(side: Side, iterations: int = 10) -> float:
    """Host syncs an iteration beyond those of the optimizer itself."""

    def counted(work: Callable[[], None]) -> int:
        side.refill()
        with Syncs() as mode:
            work()
        return mode.count

    return statistics.mean(counted(side.iterate) - counted(side.step) for _ in range(iterations))


def measure(case: Case, device: torch.device, rounds: int, wait: Callable[[], None]) -> Figure:
    """Both scalers by turns, the first of each pair alternating."""
    sides = [
        Side(case, device, torch.amp.GradScaler(device.type)),
        Side(case, device, amphal.GradScaler(device, enabled=True)),
    ]
    times: list[list[float]] = [[], []]
    for number in range(rounds + 3):
        for index in (0, 1) if number % 2 else (1, 0):
            sides[index].refill()
            wait()
            start = time.perf_counter()
            sides[index].iterate()
            wait()
            times[index].append((time.perf_counter() - start) * 1e3)
    theirs, ours = (statistics.median(series[3:]) for series in times)
    return Figure(case, theirs, ours, ours / theirs, *(syncs(side) for side in sides))


def several(device: torch.device) -> dict[str, int]:
    """Host syncs of one iteration with three optimizers, which torch steps one by one."""
    found = {}
    for fused in (True, False):
        case = Case("three optimizers", "AdamW", fused, False, 2, 64)
        scaler = amphal.GradScaler(device, enabled=True)
        sides = [Side(case, device, scaler) for _ in range(3)]
        scaler.scale(sides[0].loss)

        def once(scaler: amphal.GradScaler = scaler, sides: list[Side] = sides) -> int:
            for side in sides:
                side.refill()
            with Syncs() as own:
                for side in sides:
                    side.step()
            with Syncs() as mode:
                scaler.step_all([side.optimizer for side in sides])
                scaler.update()
            return mode.count - own.count

        once()
        found["fused" if fused else "unfused"] = once()
    return found


def show(figures: list[Figure], together: dict[str, int], device: torch.device) -> None:
    """The figures as a person reads them."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"gradient scaler on {device}, torch {torch.__version__}")
    for column in ("an iteration of", "torch ms", "amphal ms", "amphal / torch", "limit"):
        table.add_column(column, justify="left" if column == "an iteration of" else "right")
    table.add_column("host syncs torch -> amphal", justify="right")
    for f in figures:
        limit = LIMITS[f.case.name.split(",")[0]] if "large" in f.case.name else None
        table.add_row(
            f"{f.case.name}: {f.case.optimizer}{'(fused)' * f.case.fused}, "
            f"{f.case.tensors} x {f.case.numel:,}",
            f"{f.torch_ms:.3f}",
            f"{f.amphal_ms:.3f}",
            f"{f.ratio:.2f}",
            "" if limit is None or not f.case.fused else f"{limit:.2f}",
            f"{f.torch_syncs:g} -> {f.amphal_syncs:g}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"step_all of three optimizers: {together['fused']} host syncs fused, "
        f"{together['unfused']} unfused"
    )


def failures(figures: list[Figure], together: dict[str, int]) -> list[str]:
    """What is above its limit."""
    found = []
    for f in figures:
        if "large" in f.case.name and f.case.fused:
            limit = LIMITS[f.case.name.split(",")[0]]
            if f.ratio > limit:
                found.append(f"{f.case.name}: {f.ratio:.3f}, at most {limit:.2f}")
        if f.amphal_syncs != (0 if f.case.fused else 1):
            found.append(f"{f.case.name}: {f.amphal_syncs:g} host syncs")
    if together != {"fused": 0, "unfused": 1}:
        found.append(f"three optimizers: {together}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the gradient scaler beside torch's.")
    parser.add_argument("--device", help="where to measure; by default what amphal.detect() says")
    parser.add_argument("--tensors", type=int, default=24, help="parameters of the large model")
    parser.add_argument("--numel", type=int, default=1_000_000, help="elements of each")
    parser.add_argument("--rounds", type=int, default=30, help="iterations of each scaler")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="fail where a limit is exceeded")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    plan = amphal.detect(args.device)
    backend = amphal.contract.get_backend(plan.hardware.device_type)
    wait = backend.synchronize or (lambda: None)
    large, small = (args.tensors, args.numel), (args.tensors, 64)
    cases = [
        Case("clip, large", "AdamW", True, True, *large),
        Case("plain, large", "AdamW", True, False, *large),
        Case("clip, large", "AdamW", False, True, *large),
        Case("plain, large", "AdamW", False, False, *large),
        Case("clip, small", "AdamW", True, True, *small),
        Case("plain, small", "AdamW", True, False, *small),
        Case("clip, small", "AdamW", False, True, *small),
        Case("plain, small", "AdamW", False, False, *small),
    ]
    figures = [
        measure(case, plan.device, args.rounds * (1 if "large" in case.name else 20), wait)
        for case in cases
    ]
    together = several(plan.device)
    show(figures, together, plan.device)
    if args.json:
        rows: dict[str, Any] = {
            "torch": torch.__version__,
            "device": str(plan.device),
            "step_all": together,
        }
        rows["figures"] = [asdict(figure) for figure in figures]
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if args.check and (found := failures(figures, together)):
        raise SystemExit("above its limit:\n  " + "\n  ".join(found))


if __name__ == "__main__":
    main()
