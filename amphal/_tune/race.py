"""The race of the candidates: each is tried from the same state, then all are timed by turns.

The rules are in ``_race_rules``, and the clock is handed in. On several ranks the times that count
are the slowest rank's, so that all ranks decide alike.
"""

from __future__ import annotations

import gc
import math
import random
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..errors import ArgumentError, ArgumentTypeError
from .decisions import (
    AFRESH,
    LEAST_ROUNDS,
    MOST_RESTARTS,
    SAMPLE_SECONDS,
    TRIAL_STEPS,
    Lane,
    hopeless,
    hopeless_warm,
    revive,
    stop_slow,
)
from .sentences import duration
from .step import Seen, compare, problem_of, see

__all__ = ["Race", "Together", "alone"]

_WRONG_ARGUMENTS = (ArgumentError, ArgumentTypeError)

Together = Callable[[Any], Sequence[Any]]
"""Gives what every rank handed in, in the order of the ranks."""


def alone(value: Any) -> Sequence[Any]:
    """One rank."""
    return [value]


class Subject(Protocol):
    """What a race needs of the world."""

    def step(self, name: str) -> Any: ...

    def reset(self) -> None: ...

    def wait(self) -> None: ...

    def skips(self, name: str) -> int: ...

    def compiled(self) -> int: ...

    def within(self, name: str) -> AbstractContextManager[Any]: ...


class Race:
    """Tries and times candidates, the most precise first."""

    def __init__(
        self,
        names: Sequence[str],
        subject: Subject,
        *,
        clock: Callable[[], float],
        budget: float,
        rtol: float | None,
        together: Together = alone,
        progress: Callable[[float, str], None] = lambda share, text: None,
    ) -> None:
        self.lanes = [Lane(name) for name in names]
        self.subject, self.clock, self.budget, self.rtol = subject, clock, budget, rtol
        self.together, self.progress = together, progress
        self._order = random.Random(0)
        self._start, self._cold, self._since_reset = clock(), 0.0, 0

    def run(self) -> list[Lane]:
        """All of it; the lanes that are running at the end are timed and may be chosen."""
        for lane in self.lanes:
            self.progress(self._share(), f"trying {lane.name}")
            self._try(lane)
        if self.rtol is not None:
            self._compare(self.rtol)
        self._rule_out_slow()
        self._rounds()
        return self.lanes

    def _share(self) -> float:
        spent = self.clock() - self._start - self._cold
        slowest: float = max(self.together(spent))
        return min(slowest / self.budget, 1.0)

    # One step at a time.

    def _try(self, lane: Lane) -> None:
        """The first steps from the state that tune() found."""
        self.subject.reset()
        restarts = 0
        while lane.tried < TRIAL_STEPS:
            seconds, problem, skipped, compiled = self._trial_step(lane)
            lane.tried += 1
            cold, costly = lane.cold is None, seconds > self.budget / 20
            if lane.cold is None:
                lane.cold = seconds
                self._cold += seconds
            else:
                lane.warm = min(lane.warm, seconds)
            # One that compiled may be fast from now on: the others' first may have been warm.
            judged = cold and not compiled
            lane.dropped = problem or (self._why_hopeless(seconds) if judged else "")
            if lane.dropped:
                return
            if skipped and restarts < MOST_RESTARTS and not costly:
                # Its scaler has a lower scale now, so that it can begin like the others.
                self.subject.reset()
                lane.seen.clear()
                lane.tried, restarts = 0, restarts + 1
                continue
            lane.behind = lane.behind or skipped
            if costly and not cold:
                break  # two steps are enough to compare where each costs much
        lane.repeats = max(1, min(10_000, math.ceil(SAMPLE_SECONDS / max(lane.warm, 1e-9))))

    def _why_hopeless(self, first: float) -> str:
        best = min(lane.cold for lane in self.lanes if lane.cold is not None and not lane.dropped)
        if not hopeless(first, best, self.budget):
            return ""
        return f"one step took {duration(first)}, {first / best:.0f} x the fastest's first"

    def _trial_step(self, lane: Lane) -> tuple[float, str, bool, bool]:
        """The slowest rank's seconds, what is wrong, whether a scaler skipped or torch compiled."""
        skips, compiled = self.subject.skips(lane.name), self.subject.compiled()
        seconds, seen, problem = self._attempt(lane, 1)
        if not problem:
            problem = problem_of(seen)
            # What follows a skipped step is behind by one update, and no measure of precision.
            if not lane.behind:
                lane.seen.append(seen)
        skipped = not problem and self.subject.skips(lane.name) > skips
        more = self.subject.compiled() > compiled
        answers = self.together((seconds, problem, skipped, more))
        return (
            max(answer[0] for answer in answers),
            _first(answer[1] for answer in answers),
            any(answer[2] for answer in answers),
            any(answer[3] for answer in answers),
        )

    def _attempt(
        self, lane: Lane, repeats: int, *, warm_up: bool = False
    ) -> tuple[float, Seen | None, str]:
        """Seconds a step, the last result, and what was raised: one that fails is out, not all."""
        try:
            with self.subject.within(lane.name):
                if warm_up:
                    # Caches hold what the others left there, and lazy state may have to be made.
                    self.subject.step(lane.name)
                seconds, result = self._timed(lane.name, repeats)
            return seconds, see(result), ""
        except Exception as exc:
            if isinstance(exc, _WRONG_ARGUMENTS) and not isinstance(exc, RuntimeError):
                raise
            # Its frames hold what may have filled the memory; the others need it.
            traceback.clear_frames(exc.__traceback__)
            lane.error = exc
            return 0.0, None, _said(exc)

    def _timed(self, name: str, repeats: int) -> tuple[float, Any]:
        step, wait, clock = self.subject.step, self.subject.wait, self.clock
        collects = gc.isenabled()
        gc.disable()
        try:
            wait()
            start = clock()
            for _ in range(repeats):
                result = None  # or the last step's graph would live through the next one
                result = step(name)
            wait()
            seconds = clock() - start
        finally:
            if collects:
                gc.enable()
        self._since_reset += repeats
        return seconds / repeats, result

    # Is it right, and worth timing?

    def _compare(self, rtol: float) -> None:
        able = [lane for lane in self.lanes if lane.running]
        if not able:
            return
        reference, others = able[0], able[1:]
        far = [compare(lane.seen, reference.seen, rtol) for lane in others]
        told = [_first(ranks) for ranks in zip(*self.together(far), strict=True)]
        if not any(told):
            return
        doubt = self._doubt(reference, rtol)
        for lane, why in zip(others, told, strict=True):
            if why:
                lane.dropped = f"{why}{doubt}"

    def _doubt(self, reference: Lane, rtol: float) -> str:
        """Said where the reference differs from itself as well: that is no matter of precision."""
        again = Lane(reference.name)
        self.subject.reset()
        for _ in range(reference.tried):
            if self._trial_step(again)[1]:
                break
        differs = self.together(bool(compare(again.seen, reference.seen, rtol)))
        if not any(differs):
            return ""
        return (
            f"; but {reference.name} differs from itself as much when it starts again from the "
            "same state: take the batch outside of step, or pass rtol=None"
        )

    def _rule_out_slow(self) -> None:
        able = [lane for lane in self.lanes if lane.running]
        for lane in able:
            best = min(other.warm for other in able)
            if hopeless_warm(lane.warm, best, self.budget):
                lane.dropped = (
                    f"a step took {duration(lane.warm)}, {lane.warm / best:.0f} x as long"
                )

    # Interleaved rounds.

    def _rounds(self) -> None:
        done = 0
        fresh = True
        while running := [lane for lane in self.lanes if lane.running]:
            share = self._share()
            if done >= LEAST_ROUNDS and (share >= 1 or len(running) == 1):
                return
            self.progress(share, f"round {done + 1}: {', '.join(lane.name for lane in running)}")
            if fresh or self._since_reset >= AFRESH * len(running):
                self.subject.reset()
                self._since_reset, fresh = 0, True
            self._round(running, fresh)
            done, fresh = done + 1, False
            if not all(lane.running for lane in running) and revive(self.lanes):
                # Whoever stopped early was compared with one that is out now.
                done, fresh = 0, True
            elif any(lane.running for lane in running):
                stop_slow(self.lanes, self._share())

    def _round(self, running: list[Lane], fresh: bool) -> None:
        took: dict[str, tuple[float, str]] = {}
        for lane in self._order.sample(running, len(running)):
            warm_up = fresh or lane.repeats > 1
            seconds, seen, problem = self._attempt(lane, lane.repeats, warm_up=warm_up)
            took[lane.name] = seconds, problem or problem_of(seen)
        answers = self.together(took)
        for lane in running:
            lane.samples.append(max(answer[lane.name][0] for answer in answers))
            lane.dropped = _first(answer[lane.name][1] for answer in answers)
            if lane.dropped:
                self._since_reset = AFRESH * len(running)  # it may have ruined the weights


def _first(texts: Iterable[str]) -> str:
    return next(filter(None, texts), "")


def _said(exc: Exception) -> str:
    lines = str(exc).strip().splitlines() or [""]
    return f"{type(exc).__name__}: {lines[0]}".rstrip(": ")
