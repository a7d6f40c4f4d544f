"""Timing by turns: what is compared runs round by round, so that a noisy machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

__all__ = ["by_turns", "figures"]


def by_turns(
    works: Sequence[Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 3,
    wait: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """Milliseconds of each work in each round; who is first changes from round to round.

    Args:
        wait: called before each reading of the clock, such as a device's synchronize.
    """
    times: list[list[float]] = [[] for _ in works]
    for number in range(rounds + warmup):
        order = range(len(works))
        for index in order if number % 2 else reversed(order):
            wait()
            start = time.perf_counter()
            works[index]()
            wait()
            if number >= warmup:
                times[index].append((time.perf_counter() - start) * 1e3)
    return times


def figures(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """The medians in ms, and how many times faster ours is: the median of each round's ratio.

    ``undisturbed`` is the ratio of the fastest tenths, for machines where others run as well.
    """
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    fast = [sorted(times)[len(times) // 10] for times in (theirs, ours)]
    return {
        "torch_ms": statistics.median(theirs),
        "amphal_ms": statistics.median(ours),
        "times_faster": statistics.median(ratios),
        "undisturbed": fast[0] / fast[1],
    }
