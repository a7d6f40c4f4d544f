"""How ``precast_`` decides: what is fit, what reads it, and whether the outputs stay the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from .._front import Plan
from ..errors import PrecastError
from . import torch_modules
from .readers import Conversions, Reads, Weight, unfit
from .stored import State, Stored, policy_changes
from .trial import Mode, Outcome, Trial

__all__ = ["Job"]


class Job:
    """One call of :func:`precast_`."""

    def __init__(
        self, model: nn.Module, plan: Plan, lowered: frozenset[str], state: State, keep: bool
    ) -> None:
        self.model, self.plan, self.lowered = model, plan, lowered
        self.state, self.keep = state, keep
        self.left: dict[str, str] = {}
        """The parameters that stay as they are, and why."""
        self.verified: tuple[str, ...] = ()
        """The modes in which outputs were compared."""
        self._lowered: list[tuple[Weight, torch.Tensor]] = []
        """What this call stored low, with the originals."""

    def run(self, weights: list[Weight], example: object) -> None:
        try:
            self._run(weights, example)
        except BaseException:  # an interrupt too: without the originals there is no way back
            self.undo(len(self._lowered))
            raise
        finally:
            self._lowered.clear()
            self.state.trying = False

    def _run(self, weights: list[Weight], example: object) -> None:
        torch.clear_autocast_cache()  # a cast of what was trained up to now may be in it
        wanted = self._fit(weights)
        if example is None:
            wanted = self._known(wanted)
            self._lower(wanted)
        elif wanted:
            trial = Trial(self.model, example, self.plan.device, self.plan.autocast)
            self._try(trial, wanted)
        torch.clear_autocast_cache()
        if self.state.stored:
            self.state.attach(self.model)
        self.left = {w.name: self.left[w.name] for w in weights if w.name in self.left}

    def _fit(self, weights: list[Weight]) -> list[Weight]:
        reasons = unfit(self.model, self.state.device_type, self.state.low)
        if isinstance(self.model, nn.TransformerEncoderLayer):
            reason = "a check on this layer takes it off its fused kernel: precast what holds it"
            reasons = {id(w.param): reason for w in weights} | reasons
        with self.plan.autocast():
            reasons = torch_modules.dtype_picks_path(self.model) | reasons
        return self._without(weights, {w.name: reasons.get(id(w.param), "") for w in weights})

    def _known(self, weights: list[Weight]) -> list[Weight]:
        foreign = torch_modules.foreign(self.model)
        if foreign:
            return self._without(weights, dict.fromkeys((w.name for w in weights), foreign))
        if policy_changes(self.state.device_type):
            reason = "a casting policy (ops=) is in force: give example_inputs"
            return self._without(weights, dict.fromkeys((w.name for w in weights), reason))
        with self.plan.autocast():
            unknown = torch_modules.unknown_consumer
            reasons = {w.name: unknown(self.model, w.names, self.lowered) for w in weights}
        return self._without(weights, reasons)

    def _without(self, weights: list[Weight], reasons: Mapping[str, str]) -> list[Weight]:
        """Those without a reason to be left; the reasons are noted."""
        self.left.update({name: reason for name, reason in reasons.items() if reason})
        return [w for w in weights if not reasons.get(w.name)]

    def _lower(self, weights: Iterable[Weight]) -> None:
        for weight in weights:
            self._lowered.append((weight, weight.param.data))
            stored = Stored(weight, self.keep)
            stored.lower(self.state.low)
            self.state.stored[stored.name] = stored

    def undo(self, count: int) -> None:
        """Put the last parameters that were stored low back to what they were."""
        for _ in range(count):
            weight, data = self._lowered.pop()
            weight.param.data = data
            self.state.stored.pop(weight.name, None)
        if self.state.stored:
            self.state.attach(self.model)
        else:
            self.state.detach(self.model)

    def _try(self, trial: Trial, weights: list[Weight]) -> None:
        reads = Reads(weights, self.state.low, self._lowered_now())
        before = self._outcomes(trial, reads)
        modes = list(before)
        wanted = self._without(weights, {w.name: reads.reason(w) or "" for w in weights})
        wanted = self._fit(wanted)  # again: a forward may have kept a view of its weight
        if wanted:
            self.state.trying = True
            self.state.region_inside = self._has_own_region(trial, wanted, before)
            _Search(self, trial, before).add(wanted)
            self.verified = tuple(_mode_name(self.model, mode) for mode in modes)

    def _outcomes(self, trial: Trial, reads: Reads) -> dict[Mode, Outcome]:
        """What the model gives in each mode that it runs in."""
        kinds = ["no grad", "grad"]
        if torch.is_grad_enabled():
            kinds.reverse()
        if trial.differentiable:
            kinds.append("input grad")
        found: dict[Mode, Outcome] = {}
        failures = []
        for mode in ((flip, kind) for flip in (False, True) for kind in kinds):
            try:
                # Watched at the first run too: what a model computes once it may keep.
                self._watch(trial, reads, mode)
                found[mode] = trial.run(mode)
            except Exception as exc:  # such as a batch norm that can't train on one row
                failures.append(exc)
        if not found:
            raise failures[0]
        return found

    def _watch(self, trial: Trial, reads: Reads, mode: Mode, region: bool = True) -> None:
        trial.run(mode, Conversions(reads), reads, region=region)
        trial.run(mode, reads, region=region)

    def _lowered_now(self) -> frozenset[str]:
        changes = dict(policy_changes(self.state.device_type))
        more = {op for op, policy in changes.items() if policy == "lower_precision"}
        return (self.lowered - set(changes)) | more

    def _has_own_region(
        self, trial: Trial, weights: list[Weight], before: Mapping[Mode, Outcome]
    ) -> bool:
        """Whether the model enters regions itself, so that none has to be around it."""
        if torch.is_autocast_enabled(self.state.device_type):
            return False
        try:
            if not all(trial.run(m, region=False).same(was) for m, was in before.items()):
                return False
            reads = Reads(weights, self.state.low, self._lowered_now())
            for mode in before:
                self._watch(trial, reads, mode, region=False)
        except Exception:  # without a region it may not run at all
            return False
        return all(reads.reason(w) is None for w in weights)


class _Search:
    """Stores as many parameters as keep the outputs the same, by halving those that don't."""

    MOST = 60

    def __init__(self, job: Job, trial: Trial, before: Mapping[Mode, Outcome]) -> None:
        self.job, self.trial, self.before = job, trial, before
        self.runs = 0

    def add(self, weights: list[Weight]) -> None:
        job, state = self.job, self.job.state
        if self.runs >= self.MOST:
            reason = f"not tried: {self.MOST} attempts to find what changes the outputs were made"
            job._without(weights, dict.fromkeys((w.name for w in weights), reason))
            return
        self.runs += 1
        try:
            job._lower(weights)
            state.attach(job.model)
            alike = self._alike()
            reason = "the outputs change when it is stored low"
        except Exception as exc:
            alike, reason = False, f"the model raises when it is stored low: {_short(exc)}"
        if alike:
            return
        job.undo(len(weights))
        if self.runs == 1 and not self._alike():
            raise PrecastError(
                "the model gives other outputs at a second run with the same inputs and random "
                "state, so nothing can be compared: torch.use_deterministic_algorithms(True) may "
                "help, or a precast_ of those modules in it that are deterministic"
            )
        if len(weights) == 1:
            job._without(weights, {weights[0].name: reason})
            return
        self.add(weights[: len(weights) // 2])
        self.add(weights[len(weights) // 2 :])

    def _alike(self) -> bool:
        return all(self.trial.run(mode).same(was) for mode, was in self.before.items())


def _short(exc: Exception) -> str:
    text = f"{type(exc).__name__}: {exc}".splitlines()[0]
    return text if len(text) < 120 else f"{text[:117]}..."


def _mode_name(model: nn.Module, mode: Mode) -> str:
    flip, kind = mode
    return f"{'train' if model.training is not flip else 'eval'}, {kind}"
