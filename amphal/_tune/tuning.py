"""``tune()``: measure the user's own step under each precision, and take the fastest that is right.

Its parts: the candidates (``candidates``), what the step's function holds (``held``) and its copy
(``snapshot``, ``settings``), the step and its results (``step``), the race (``race``) and its rules
(``decisions``), what is shown (``show``) and kept (``cache``).
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any

import torch

from .. import _environment, _front
from .._choice import choice
from .._front import Plan
from .._torch import matmul, private
from ..contract import Backend, DeviceLike, PrecisionLike, registry
from ..errors import ArgumentError, TuneError
from . import candidates as contenders
from .arguments import Together, common, seconds, together_in, tolerance_of
from .cache import Cache
from .decisions import Lane, fastest, ratio_to, spread_of, winner
from .held import held_by, only_known_optimizers
from .race import Race
from .sentences import Measurement
from .show import drawer, progress_bar
from .snapshot import Snapshot
from .step import Step

__all__ = ["tune"]

_one_at_a_time = threading.RLock()


def tune(
    step: Callable[..., Any],
    *,
    candidates: Iterable[PrecisionLike | Plan] | None = None,
    budget_s: float = 10,
    device: DeviceLike | None = None,
    state: Iterable[object] | None = None,
    rtol: float | None = 0.05,
    progress: bool = True,
    chart: str | PathLike[str] | None = None,
    cache: str | None = None,
    process_group: Any = None,
) -> Plan:
    """Run ``step`` under each precision that this hardware can do, and return the fastest plan.

    Every candidate starts from the same state and the same random numbers. One whose losses are
    not finite, or not close to those of the most precise, is dropped. The others are timed in
    interleaved rounds. Afterwards the state is as it was before, also when something is raised.

    Args:
        step: one step of the user's work: ``step(plan)`` enters ``plan.autocast()`` itself;
            ``step(plan, scaler)`` also gets a scaler, one a candidate; ``step()`` runs inside the
            candidate's region and must not train. It returns the loss (a tensor or a number), an
            output tensor, or None.
        candidates: names (``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"``, ``"fp32:high"``,
            ``"fp32:medium"``), torch dtypes or plans. None: all that the hardware can do, or what
            ``AMPHAL_PRECISION`` names.
        budget_s: seconds to measure. Each candidate's first step, which may compile, comes on top,
            and three rounds are always made.
        device: where the step runs; None as for :func:`detect`.
        state: what the step changes, to be put back: modules, optimizers, schedulers, scalers,
            tensors, generators, lists, dicts, sets, or what has ``state_dict()`` and
            ``load_state_dict()``. None: what the step's function holds directly, in its closure,
            its defaults, its ``functools.partial`` arguments, its bound ``self`` and the attributes
            of that; an error where no module is among them. Iterators cannot be put back.
        rtol: how far losses or outputs may be from the most precise candidate's, relative. None
            compares nothing.
        progress: a bar on stderr, where that is a terminal.
        chart: ``"text"`` prints bars; the path of a ``.png`` file saves a chart.
        cache: a name for this step. The answer is kept in the user's cache folder for this
            hardware, torch, amphal, number of threads and list of candidates, and read next time.
        process_group: measure in lock step with the ranks of this group, by its slowest. Required
            where there are several ranks.

    Returns:
        The plan: ``plan.measured`` has a row a candidate, ``plan.explain()`` tells them.

    Raises:
        TuneError: no candidate could be chosen; each one's reason is told.
        ArgumentError, ArgumentTypeError: arguments, a step or a result that cannot be used.
        MissingExtraError: a PNG was asked for and matplotlib is missing.
    """
    own = Step(step)
    owners = held_by(step) if state is None else _owners(state)
    budget, tolerance = seconds("budget_s", budget_s), tolerance_of(rtol)
    draw = drawer(chart)
    together = together_in(process_group)
    unmeasured = _front.detect(device)
    backend = registry.get_backend(unmeasured.hardware.device_type)
    matmuls = dict(backend.float32_matmul(unmeasured.hardware))
    plans = _plans(candidates, unmeasured, backend, matmuls)
    plans = common(plans, together)
    preferred = together(contenders.name_of(unmeasured, matmuls))[0]
    entry = None if cache is None else Cache(cache, _key(unmeasured, plans, tolerance))

    found = _recall(entry, together)
    source = "measured before, read from the cache" if found else ""
    if found is None:
        with _one_at_a_time, progress_bar(progress) as tell:
            found = _measure(
                own,
                plans,
                owners,
                state is None,
                backend,
                preferred,
                together,
                {"budget": budget, "rtol": tolerance, "progress": tell},
            )
        if entry is not None:
            entry.write(*found)
    chosen, rows = found
    draw(rows, chosen, f"{unmeasured.hardware.name}: {chosen} chosen")
    reasons = contenders.reasons(plans[chosen], unmeasured, rows, chosen, source)
    return replace(plans[chosen], reasons=reasons, measured=rows)


class _World:
    """The step, its state and its device, as a race sees them."""

    def __init__(
        self, step: Step, plans: dict[str, Plan], snapshot: Snapshot, backend: Backend
    ) -> None:
        self._step, self._plans, self._snapshot = step, plans, snapshot
        self._calls = {name: step.caller(name, plan) for name, plan in plans.items()}
        self.wait: Callable[[], None] = backend.synchronize or (lambda: None)
        if step.takes == 0 and snapshot.has_optimizer():
            raise self._must_not_train("it holds an optimizer")

    def step(self, name: str) -> Any:
        return self._calls[name]()

    def skips(self, name: str) -> int:
        return self._step.skips(name)

    def compiled(self) -> int:
        return private.frames_compiled()

    def within(self, name: str) -> AbstractContextManager[None]:
        return self._plans[name].matmul()

    def reset(self) -> None:
        if self._step.takes == 0 and self._snapshot.gradients_changed():
            raise self._must_not_train("it left gradients")
        self._snapshot.restore()

    @staticmethod
    def _must_not_train(why: str) -> ArgumentError:
        return ArgumentError(
            f"step() takes no argument, so it runs inside the candidate's region as a whole, and "
            f"a backward pass or an optimizer's step does not belong there: {why}. Write "
            "step(plan, scaler), with the forward pass inside plan.autocast(); if it is inference, "
            "name what it changes: state=[model]"
        )


def _measure(
    step: Step,
    plans: dict[str, Plan],
    owners: Iterable[object],
    found: bool,
    backend: Backend,
    preferred: str,
    together: Together,
    how: dict[str, Any],
) -> tuple[str, tuple[Measurement, ...]]:
    device = next(iter(plans.values())).device
    snapshot = Snapshot(owners, device)
    try:
        world = _World(step, plans, snapshot, backend)
        names = contenders.by_precision(plans)
        race = Race(names, world, clock=time.perf_counter, together=together, **how)
        with only_known_optimizers(snapshot) if found else nullcontext():
            lanes = race.run()
    finally:
        snapshot.restore()
        snapshot.forget()
    if not any(lane.running for lane in lanes):
        reasons = "; ".join(f"{lane.name}: {lane.dropped}" for lane in lanes)
        error = next((lane.error for lane in lanes if lane.error is not None), None)
        raise TuneError(
            f"no candidate could be chosen: {reasons}. If the reason is the step's own, run it "
            "once without tune()"
        ) from error
    return winner(lanes, preferred).name, _rows(lanes)


def _rows(lanes: Sequence[Lane]) -> tuple[Measurement, ...]:
    base = fastest([lane for lane in lanes if lane.running])
    # The last step that everybody has a result of, so that losses in one table can be compared.
    last = min((len(lane.seen) for lane in lanes if not lane.dropped and lane.seen), default=0) - 1
    rows = []
    for lane in lanes:
        timed = bool(lane.samples) and not lane.dropped
        seen = lane.seen[last] if 0 <= last < len(lane.seen) else None
        loss = seen.loss if seen is not None else None
        rows.append(
            Measurement(
                candidate=lane.name,
                seconds=statistics.median(lane.samples) if timed else None,
                ratio=statistics.median(ratio_to(base, lane)) if timed else None,
                spread=spread_of(lane) if timed else None,
                rounds=len(lane.samples),
                loss=loss if loss is not None and math.isfinite(loss) else None,
                dropped=bool(lane.dropped),
                note=lane.dropped or lane.stopped,
            )
        )
    return tuple(rows)


def _plans(given: Any, base: Plan, backend: Backend, matmuls: dict[str, str]) -> dict[str, Plan]:
    can_scale = choice.has_scaler(backend, backend.scaler(base.hardware))
    if given is not None:
        return contenders.named_candidates(given, base, matmuls, can_scale)
    named = _environment.read(_environment.PRECISION)
    if named.lower() not in ("", "auto"):  # detect() has checked it
        return contenders.named_candidates([base.dtype], base, matmuls, can_scale)
    return contenders.usual_candidates(base, matmuls, matmul.current(), can_scale)


def _key(base: Plan, plans: dict[str, Plan], rtol: float | None) -> dict[str, Any]:
    from .._version import __version__

    return {
        "hardware": base.hardware.to_dict(),
        "device": str(base.device),
        "torch": torch.__version__,
        "amphal": __version__,
        "threads": torch.get_num_threads(),
        "candidates": {name: plan.use_scaler for name, plan in plans.items()},
        "matmul": matmul.current(),
        "rtol": rtol,
    }


def _recall(entry: Cache | None, together: Together) -> tuple[str, tuple[Measurement, ...]] | None:
    """The entry, if every rank has one of the same choice."""
    if entry is None:
        return None
    found = entry.read()
    chosen = {None if answer is None else answer for answer in together(found and found[0])}
    return found if len(chosen) == 1 else None


def _owners(state: Any) -> list[object]:
    try:
        return list(state) if not isinstance(state, torch.nn.Module) else [state]
    except TypeError:
        return [state]  # one object; the snapshot says whether it is a right one
