"""How the benchmarks measure: variants in turn, round by round, and medians of the rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Times = dict[str, list[float]]


def waiter(device: torch.device) -> Callable[[], None]:
    """What waits for the device's work to end; nothing on a CPU."""
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.get_device_module(device).synchronize()


def in_turn(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    calls: int = 1,
    wait: Callable[[], None] = lambda: None,
    warm_up: int = 2,
) -> Times:
    """Seconds a call of each variant, a figure a round.

    All variants run in every round, each time another one first, so that what else the machine
    does meets all alike. ``calls`` is how often a variant runs in a row: enough for the clock.
    """
    names = list(variants)
    times: Times = {name: [] for name in names}
    for i in range(rounds + warm_up):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            run = variants[name]
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            wait()
            if i >= warm_up:
                times[name].append((time.perf_counter() - start) / calls)
    return times


def median(times: Times, name: str) -> float:
    return statistics.median(times[name])


def ratio(times: Times, name: str, base: str) -> float:
    """The median over the rounds of ``name``'s time to ``base``'s in the same round."""
    pairs = zip(times[name], times[base], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def sized(run: Callable[[], object], rounds: int, variants: int) -> tuple[int, int]:
    """Calls in a row, and rounds, for variants like ``run``: 50 ms each, 30 s in all, 5 rounds."""
    run()
    start = time.perf_counter()
    run()
    once = max(time.perf_counter() - start, 1e-9)
    calls = max(1, round(0.05 / once))
    return calls, max(5, min(rounds, int(30 / (once * calls * variants))))
