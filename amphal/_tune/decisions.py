"""How a race of candidates is decided: pure functions of the times that were taken."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from .step import Seen

__all__ = [
    "AFRESH",
    "LEAST_ROUNDS",
    "MOST_RESTARTS",
    "SAMPLE_SECONDS",
    "TRIAL_STEPS",
    "Lane",
    "fastest",
    "hopeless",
    "hopeless_warm",
    "ratio_to",
    "revive",
    "spread_of",
    "stop_slow",
    "winner",
]

TRIAL_STEPS = 3
"""Steps of each candidate from the same state, whose results are compared; the first is cold."""
MOST_RESTARTS = 12
"""How often a candidate may begin its trial again with the lower scale that a skip led to."""
LEAST_ROUNDS = 3
EARLY, LATE = 0.1, 0.3
"""Parts of the budget; nobody is stopped before the first."""
CLEARLY = 1.5
"""Stopped after the least rounds or more: slower than this multiple of the fastest in all."""
SLOWER = 1.05
MANY_ROUNDS = 8
"""Stopped late and after many rounds: slower than that multiple in three quarters of them."""
TIE = 1.02
"""What is within this multiple of the fastest is as fast."""
SAMPLE_SECONDS = 0.005
"""The least that one sample takes; faster steps are repeated."""
AFRESH = 64
"""After so many steps the state is put back: nothing trains for good on one batch."""


@dataclass
class Lane:
    """One candidate, and what became of it."""

    name: str
    samples: list[float] = field(default_factory=list)
    """Seconds a step, one a round, from the first round on."""
    seen: list[Seen | None] = field(default_factory=list)
    tried: int = 0
    """Steps from the state that was found."""
    behind: bool = False
    """A scaler has skipped one of these steps, so what follows cannot be compared."""
    cold: float | None = None
    """Seconds of the very first step."""
    warm: float = math.inf
    """Seconds of the fastest trial step but the first."""
    repeats: int = 1
    dropped: str = ""
    stopped: str = ""
    error: Exception | None = None

    @property
    def running(self) -> bool:
        """Still to be timed."""
        return not self.dropped and not self.stopped


def ratio_to(base: Lane, lane: Lane) -> list[float]:
    """Times of ``lane`` over those of ``base``, in the rounds that both ran in."""
    return [a / b if b else math.inf for a, b in zip(lane.samples, base.samples, strict=False)]


def spread_of(lane: Lane) -> float:
    """How far the middle half of a lane's times lies apart, as a part of their median."""
    if len(lane.samples) < 2:
        return 0.0
    lower, middle, upper = statistics.quantiles(lane.samples, n=4, method="inclusive")
    return (upper - lower) / middle if middle else 0.0


def fastest(lanes: Sequence[Lane]) -> Lane:
    """The lane of the lowest median."""
    return min(lanes, key=lambda lane: statistics.median(lane.samples))


def winner(lanes: Sequence[Lane], preferred: str) -> Lane:
    """The fastest; of those that are as fast, the preferred one, else the first (most precise)."""
    able = [lane for lane in lanes if lane.samples and lane.running]
    base = fastest(able)
    tied = [lane for lane in able if statistics.median(ratio_to(base, lane)) <= TIE or lane is base]
    return next((lane for lane in tied if lane.name == preferred), tied[0])


def hopeless(first: float, fastest_first: float, budget: float) -> bool:
    """Whether one cold step rules a candidate out. It may have compiled, so a lot is allowed."""
    return first > (4 if first > budget else 16) * fastest_first and first > budget / 10


def hopeless_warm(warm: float, fastest_warm: float, budget: float) -> bool:
    """Whether a warm step does."""
    return warm > 3 * fastest_warm and warm > budget / 20


def stop_slow(lanes: Sequence[Lane], share: float) -> None:
    """Stop who is clearly slower. ``share`` is the part of the budget that is spent.

    Other programs make single times too long, never too short: so the ratios of the rounds and the
    shortest times have to agree, and steps that cost little are all given a good number of rounds.
    """
    if share < EARLY:
        return
    running = [lane for lane in lanes if lane.running]
    base = fastest(running)
    for lane in running:
        ratios = ratio_to(base, lane)
        if lane is base or len(ratios) < LEAST_ROUNDS:
            continue
        shortest = min(lane.samples) / min(base.samples)
        lower = statistics.quantiles(ratios, n=4, method="inclusive")[0]
        many = len(ratios) >= MANY_ROUNDS and share >= LATE
        if min(ratios) > CLEARLY < shortest or (many and lower > SLOWER < shortest):
            lane.stopped = "clearly slower, so stopped early"


def revive(lanes: Sequence[Lane]) -> bool:
    """Let those that stopped early run again, all from no round at all; False if there are none."""
    stopped = [lane for lane in lanes if lane.stopped and not lane.dropped]
    for lane in stopped:
        lane.stopped = ""
    if stopped:
        for lane in lanes:
            lane.samples.clear()
    return bool(stopped)
