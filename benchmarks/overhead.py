"""What the front end costs beside torch's own: regions, detect(), import.

    python benchmarks/overhead.py [--rounds 40] [--json PATH]

Every figure is a ratio taken in one run: the variants are timed in turn, round by round, and the
median of each round's ratio is reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import timeit
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import amphal

BF16 = torch.bfloat16
LOOPS = 2000


def region_built_by_torch() -> None:
    with torch.autocast("cpu", dtype=BF16):
        pass


def region_built_by_amphal() -> None:
    with amphal.autocast("cpu", dtype=BF16):
        pass


def region_of_the_plan() -> None:
    with amphal.autocast():
        pass


def timed(function: Callable[[], object], loops: int = LOOPS) -> float:
    """Microseconds a call."""
    return timeit.timeit(function, number=loops) / loops * 1e6


def interleaved(
    base: Callable[[], object], other: Callable[[], object], rounds: int
) -> dict[str, float]:
    """The median time of both, and the median of the rounds' ratios."""
    pairs = []
    for i in range(rounds + 2):
        first, second = (base, other) if i % 2 else (other, base)
        times = {first: timed(first), second: timed(second)}
        pairs.append((times[base], times[other]))
    pairs = pairs[2:]  # warm-up
    return {
        "torch_us": statistics.median(b for b, _ in pairs),
        "amphal_us": statistics.median(o for _, o in pairs),
        "ratio": statistics.median(o / b for b, o in pairs),
    }


def regions(rounds: int) -> dict[str, dict[str, float]]:
    found = {
        "built and entered each time": interleaved(
            region_built_by_torch, region_built_by_amphal, rounds
        )
    }
    # What a script says that names neither device nor dtype; torch has to be told both.
    found["built without arguments"] = interleaved(
        region_built_by_torch, region_of_the_plan, rounds
    )
    with torch.autocast("cpu", dtype=BF16), amphal.autocast("cpu", dtype=BF16):
        found["the same, nested"] = interleaved(
            region_built_by_torch, region_built_by_amphal, rounds
        )
    theirs, ours = torch.autocast("cpu", dtype=BF16), amphal.autocast("cpu", dtype=BF16)

    def reused(region: torch.autocast) -> Callable[[], None]:
        def run() -> None:
            with region:
                pass

        return run

    found["one object reused"] = interleaved(reused(theirs), reused(ours), rounds)
    return found


def import_cost(rounds: int) -> float:
    """Milliseconds that ``import amphal`` adds to ``import torch``, in fresh interpreters."""
    code = (
        "import time, torch; t = time.perf_counter(); import amphal;"
        "print((time.perf_counter() - t) * 1e3)"
    )
    times = [
        float(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(rounds)
    ]
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the front end beside torch's own.")
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds a figure")
    parser.add_argument("--imports", type=int, default=7, help="fresh interpreters")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    warnings.simplefilter("ignore", amphal.PrecisionWarning)

    figures: dict[str, object] = {"torch": torch.__version__, "regions": regions(args.rounds)}
    amphal.detect()
    figures["detect_cached_us"] = statistics.median(
        timed(amphal.detect) for _ in range(args.rounds)
    )
    figures["import_ms"] = import_cost(args.imports)

    from rich.console import Console
    from rich.table import Table

    table = Table("region", "torch us", "amphal us", "amphal / torch", title="autocast regions")
    for name, row in figures["regions"].items():  # type: ignore[attr-defined]
        table.add_row(name, *(f"{row[k]:.2f}" for k in ("torch_us", "amphal_us", "ratio")))
    console = Console()
    console.print(table)
    console.print(f"detect() from the cache: {figures['detect_cached_us']:.2f} us")
    console.print(f"import amphal after import torch: {figures['import_ms']:.1f} ms")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
