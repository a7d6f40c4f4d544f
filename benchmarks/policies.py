"""What a region's own casting policy costs: ops it names, ops it doesn't, entering it.

    python benchmarks/policies.py [--rounds 60] [--json PATH]

The variants are timed in turn, round by round, and the medians over the rounds are reported: of
the times, of their differences and of their ratios. Tensors are tiny, so that what is measured is
the cost a call and not the arithmetic. Bounds: an op that is not named at 1.05 times its time
without a policy, a named op's extra cost at 10 us, a second entry at 30 us.
"""

from __future__ import annotations

import argparse
import json
import statistics
import timeit
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import amphal

Call = Callable[[], object]
Region = Callable[[], AbstractContextManager[Any]]

NAMED = {"softmax": "fp32", "layer_norm": "lower_precision", "mse_loss": "as_is"}
FULL = torch.randn(4, 8)
LOW = FULL.bfloat16()
WEIGHT = torch.randn(8, 8)


def plain() -> AbstractContextManager[Any]:
    return amphal.autocast("cpu", dtype="bf16")


def with_policy() -> AbstractContextManager[Any]:
    return amphal.autocast("cpu", dtype="bf16", ops=NAMED)


def timed(call: Call, region: Region, loops: int) -> float:
    """Microseconds a call, within the region."""
    with torch.no_grad(), region():
        return timeit.timeit(call, number=loops) / loops * 1e6


def compare(
    base: tuple[Call, Region], other: tuple[Call, Region], rounds: int, loops: int
) -> dict[str, float]:
    """Medians of both times, of the rounds' differences and of their ratios."""
    pairs = []
    for i in range(rounds + 2):
        order = (base, other) if i % 2 else (other, base)
        times = {id(variant): timed(*variant, loops) for variant in order}
        pairs.append((times[id(base)], times[id(other)]))
    pairs = pairs[2:]  # warm-up
    return {
        "without_us": statistics.median(b for b, _ in pairs),
        "with_us": statistics.median(o for _, o in pairs),
        "extra_us": statistics.median(o - b for b, o in pairs),
        "ratio": statistics.median(o / b for b, o in pairs),
    }


UNNAMED: dict[str, Call] = {
    "relu": lambda: F.relu(LOW),
    "add": lambda: LOW + LOW,
    "linear (on the built-in list)": lambda: F.linear(FULL, WEIGHT),
    "cat (on the built-in list)": lambda: torch.cat([LOW, LOW]),
    "gelu": lambda: F.gelu(LOW),
}

# A named op against the same work written by hand: what the policy itself costs. Its whole extra
# cost, with the cast that it makes, is against the op without a policy.
CASTS: dict[str, tuple[Call, Call]] = {
    "softmax: fp32": (lambda: F.softmax(LOW, -1), lambda: F.softmax(LOW.float(), -1)),
    "layer_norm: lower_precision": (
        lambda: F.layer_norm(FULL, (8,)),
        lambda: F.layer_norm(FULL.bfloat16(), (8,)),
    ),
    "mse_loss: as_is": (lambda: F.mse_loss(LOW, LOW), lambda: F.mse_loss(LOW, LOW)),
}


def off() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", enabled=False)


def entering(region: Region) -> Call:
    def run() -> None:
        with region():
            pass

    return run


def entries(rounds: int) -> dict[str, dict[str, float]]:
    cuda = amphal.op_lists("cuda")
    variants: dict[str, tuple[Region, Region]] = {
        "two ops": (
            lambda: amphal.autocast(
                "cpu", dtype="bf16", ops={"softmax": "fp32", "layer_norm": "lower_precision"}
            ),
            nullcontext,
        ),
        "three ops": (with_policy, nullcontext),
        "three ops, within another such region": (with_policy, with_policy),
        "CUDA's lists on the CPU": (
            lambda: amphal.autocast("cpu", dtype="bf16", ops=cuda),
            nullcontext,
        ),
        "CUDA's lists, within another such region": (
            lambda: amphal.autocast("cpu", dtype="bf16", ops=cuda),
            lambda: amphal.autocast("cpu", dtype="bf16", ops=cuda),
        ),
    }
    return {
        name: compare((entering(plain), around), (entering(region), around), rounds, 100)
        for name, (region, around) in variants.items()
    }


def show(console: Console, title: str, rows: dict[str, dict[str, float]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("", "without (us)", "with (us)", "extra (us)", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in rows.items():
        cells = (row["without_us"], row["with_us"], row["extra_us"], row["ratio"])
        table.add_row(name, *(f"{v:.2f}" for v in cells[:3]), f"{cells[3]:.3f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="rounds of each comparison")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore", amphal.PrecisionWarning)
    torch.set_num_threads(1)
    rounds = options.rounds
    figures = {
        "ops that the policy does not name": {
            name: compare((call, plain), (call, with_policy), rounds, 1000)
            for name, call in UNNAMED.items()
        },
        "named ops, against the same op without a policy": {
            name: compare((call, plain), (call, with_policy), rounds, 500)
            for name, (call, _) in CASTS.items()
        },
        "named ops, against the same casts by hand": {
            name: compare((by_hand, off), (call, with_policy), rounds, 500)
            for name, (call, by_hand) in CASTS.items()
        },
        "entering and leaving a region again, against one without a policy": entries(rounds),
    }
    console = Console()
    for title, rows in figures.items():
        show(console, title, rows)
    if options.json:
        found = {"torch": torch.__version__, "rounds": rounds, "figures": figures}
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
