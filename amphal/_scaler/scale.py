"""The scale of a gradient scaler: where it lies, how it moves, and what the host knows of it.

It lies on the device. The host keeps a lower bound of it: while that is 1 or more, unscaling cannot
overflow and torch's kernels are exact as they are; below, the products are checked as well.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from .._torch import float16_regions, private
from ..errors import ArgumentError, ScaleCollapseError, ScalerStateError
from . import arguments as rules
from . import gradients
from . import names as grad_names
from .ledger import Ledger
from .optimizer_state import OptimizerState
from .optimizers import ByOptimizer
from .outcome import AT_FLOOR, UNREAD_LIMIT, History, StepOutcome

__all__ = ["Scale"]


class _Lost:
    """Stands for a process group that could not be pickled."""

    def __reduce__(self) -> str:
        return "LOST"

    def __repr__(self) -> str:
        return "<a process group that was not pickled>"


LOST = _Lost()


class Scale(torch.amp.GradScaler):
    """The part of a scaler that scales losses and moves the scale."""

    _min_scale: float
    _max_scale: float
    _hysteresis: int
    _max_consecutive_skips: int | None
    _on_skip: Callable[[int], object] | None
    _model: weakref.ref[torch.nn.Module] | None
    _native: bool
    _enabled: bool
    _follows: bool
    _device: str
    _per_optimizer_states: dict[int, OptimizerState]  # type: ignore[assignment]

    def _start(self) -> None:
        """What an iteration boundary looks like; also after unpickling."""
        self._history = History()
        # By identity: an optimizer, or what wraps one, need not be hashable.
        self._outcomes: ByOptimizer[StepOutcome] = ByOptimizer()
        # The gradients that the latest step with a closure left behind, and their versions.
        self._spent: ByOptimizer[list[tuple[Any, int]]] = ByOptimizer()
        self._kept_state: dict[str, Any] = {}
        self._hysteresis_spent: Any = 0.0  # a float32 scalar on the scale's device once it counts
        self._scale_calls = self._calls_at_update = 0
        self._ledger = Ledger()
        # Whether every gradient is noted. With one optimizer whose gradients are new in each
        # iteration that would be wasted work, so after the first iteration only one is noted.
        self._notes_all = True
        self._survived = False  # gradients that were noted were seen again
        self._moves, self._calls_at_move = 0, 0  # update() and load_state_dict()
        self._scale_of_losses: Tensor | None = None  # of the latest scale() before a move
        self._stepped = False
        self._seen: tuple[Tensor | None, int] = (None, 0)
        self._lower = 0.0

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        with torch.inference_mode(False):
            scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
            tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)
        # What is made inside a transform of torch.func is dead after it.
        if not torch.compiler.is_compiling() and private.under_transform():
            scale, tracker = map(private.outside_transforms, (scale, tracker))
        self._scale, self._growth_tracker = scale, tracker
        self._note_scale(gradients.float32(self._init_scale))

    def _note_scale(self, lower: float) -> None:
        """The scale was just written by this scaler and is at least ``lower``."""
        assert self._scale is not None
        self._lower = lower if lower > 0.0 else 0.0  # also for NaN
        self._seen = (self._scale, self._scale._version)

    def _lower_bound(self) -> float:
        """A lower bound of the scale without asking the device; 0 if others wrote to the scale."""
        if self._scale is not None:
            value = gradients.host_value(self._scale)
            if value is not None:
                return value if value > 0.0 else 0.0
        scale, version = self._seen
        if scale is self._scale and scale is not None and scale._version == version:
            return self._lower
        return 0.0

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise rules.missing_scale(funcname)
        return self._scale, self._growth_tracker

    @private.out_of_graphs
    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or every tensor in nested lists, tuples and iterables, by the scale.

        A float16 or bfloat16 scalar becomes float32. When disabled, ``outputs`` comes back as is.

        A scaler with ``enabled=None`` that is off is turned on by a loss from a float16 region.

        Raises:
            ScalerStateError: the loss would turn the scaler on, and one before it in this iteration
                was not scaled.
            ArgumentError: the loss comes from a float16 region on hardware where no scaler can see
                an overflow, or only the vendor's.
            ArgumentError: something that is neither a tensor nor an iterable of tensors.
        """
        if not self._enabled and not (self._follows and self._turned_on()):
            return outputs
        self._scale_calls += 1
        if self._per_optimizer_states:
            self._watch_unscaled()
        if isinstance(outputs, Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            scale = self._scale
            assert scale is not None
            if scale.device != outputs.device:
                scale = scale.to(outputs.device, non_blocking=True)
            return outputs * scale
        if isinstance(outputs, (list, tuple)):
            scaled = [self.scale(value) for value in outputs]
            return type(outputs)(*scaled) if hasattr(outputs, "_fields") else type(outputs)(scaled)
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes, dict)):
            return map(self.scale, outputs)
        raise ArgumentError(
            "outputs must be a tensor or an iterable of tensors, "
            f"got {type(outputs).__name__} ({outputs!r})"
        )

    def _watch_unscaled(self) -> None:
        """Note the unscaled gradients while another loss is scaled: see :meth:`_unmixed`."""
        if torch.compiler.is_compiling():
            return
        for state in self._per_optimizer_states.values():
            if state.stage is OptState.UNSCALED and state.watched is None:
                state.watched = {
                    id(p): None if p.grad is None else (p.grad, p.grad._version)
                    for p in gradients.params_of(state.optimizer)
                }

    def _unmixed(self, state: OptimizerState) -> None:
        """Refuse gradients to which a backward pass has added after they were unscaled.

        What it added carries the scale, so the sum is neither scaled nor unscaled.
        """
        if state.watched is None:
            return
        mixed = []
        for param in gradients.params_of(state.optimizer):
            if param.grad is not None and id(param) in state.watched:
                before = state.watched[id(param)]
                if (
                    before is None
                    or before[0] is not param.grad
                    or before[1] != param.grad._version
                ):
                    mixed.append(param)
        if mixed:
            raise ScalerStateError(
                f"{grad_names.listed(grad_names.names_of(mixed, self._names()))}: a backward pass "
                "came after unscale_ or clip_grad_norm_, so scaled gradients were added to "
                "unscaled ones, or took their place. Run every backward pass before them. For two "
                "passes in one step (SAM): scaler.update() after the first, or a closure in step()"
            )

    def _turned_on(self) -> bool:
        """Whether the loss may come from a float16 region, which turns a scaler that is off on."""
        device = self._device
        if device not in float16_regions and not (
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16
        ):
            self._scale_calls += 1
            return False
        if self._scale_calls != self._calls_at_update:
            raise ScalerStateError(
                "this loss comes from a float16 region, and a loss before it in this iteration was "
                "not scaled, since it came from another: their gradients would be added. Make the "
                "scaler with enabled=True, or use one dtype in an iteration"
            )
        self._native = rules.native_for_float16(device)
        self._enabled, self._follows = True, False
        kept, self._kept_state = self._kept_state, {}
        self.load_state_dict(kept)
        return True

    @private.out_of_graphs
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration: back the scale off or let it grow. No host sync of its own.

        With fused optimizers the host learns of overflows when a counter or an outcome is read,
        and after 64 iterations at most, by one read. Until then nothing can be written wrongly:
        the decision is the device's.

        Args:
            new_scale: set the scale to this, inside the bounds, instead.

        Raises:
            ScalerStateError: nothing was stepped or unscaled since the last update.
            ScaleCollapseError: overflows at the floor, or too many in a row. The iteration has
                ended as usual; the parameters are as they were before it.
            ArgumentError, ArgumentTypeError: ``new_scale`` is no scale; nothing was changed.
        """
        if not self._enabled:
            if self._stepped:
                self._stepped = False
                self._history.stepped()
            self._per_optimizer_states.clear()
            self._calls_at_update = self._scale_calls
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states
        if new_scale is not None:
            value = rules.new_scale(new_scale, self._min_scale, self._max_scale, scale)
            flag, found = _evidence(list(states.values()), scale.device)
            before = self._before_move()
            scale.fill_(value)
            self._after_move(before)
            self._note_scale(gradients.float32(value))
            if flag is not None:
                self._history.append(flag if found is None else float(found))
                self._read_if_due(found)
        else:
            self._advance(scale, tracker, list(states.values()))
        self._per_optimizer_states = defaultdict(OptimizerState)
        self._calls_at_update = self._scale_calls
        self._notes_all = self._survived or len(self._outcomes) > 1
        try:
            self._history.tell(self._on_skip)  # last: a hook that raises finds the iteration ended
        finally:
            if self._history.collapse is not None:
                raise self._collapse_error(states.values())

    def _advance(self, scale: Tensor, tracker: Tensor, states: list[OptimizerState]) -> None:
        flag, found = _evidence(states, scale.device)
        if flag is None:
            if not any(state.stage is not OptState.READY for state in states):
                raise ScalerStateError(
                    "update() found no optimizer that was stepped or unscaled since the last "
                    "update: call scaler.step(optimizer) first"
                )
            return  # no gradient anywhere: no evidence for either direction
        lower = self._lower_bound()
        record: float | Tensor = flag if found is None else float(found)
        if found is not False and lower <= self._min_scale:  # then it may be at the floor
            at_floor = ~(scale > self._min_scale)
            if found is None:
                record = flag * (1 - 2 * at_floor.to(flag.dtype))
            elif at_floor.item():
                record = AT_FLOOR
        before = self._before_move(rare=False)
        self._move_scale(scale, tracker, flag)
        if found is not False:
            lower *= self._backoff_factor
        if lower < self._min_scale or self._max_scale < rules.LARGEST:
            scale.clamp_(self._min_scale, self._max_scale)
            lower = max(lower, self._min_scale) if lower else 0.0
        self._after_move(before)
        self._note_scale(lower)
        self._history.append(record)
        if found is not None or len(self._history) >= UNREAD_LIMIT:
            if found and lower < 1.0:
                # Rare, and the host has waited in this iteration anyway: know the scale again.
                self._note_scale(scale.item())
            self._read_if_due(found)

    def _before_move(self, *, rare: bool = True) -> tuple[Tensor, list[Tensor]] | None:
        """The scale before it changes, and the parameters whose gradients wait for their step.

        ``rare``: set by hand or loaded, so that gradients may wait with one optimizer too.
        """
        assert self._scale is not None
        if torch.compiler.is_compiling():
            return None
        calls, self._moves = self._calls_at_move, self._moves + 1
        self._calls_at_move = self._scale_calls
        if not rare and not self._notes_all:
            self._scale_of_losses = None
            return None
        old, waiting = self._scale.clone(), []
        if calls != self._scale_calls:
            self._scale_of_losses = old
        moment = (self._moves, self._scale_calls)
        for optimizer in self._outcomes.optimizers():
            state = self._per_optimizer_states.get(id(optimizer))
            if state is None or state.stage is OptState.READY:
                waiting += [
                    param
                    for param in gradients.params_of(optimizer)
                    if param.grad is not None and not self._ledger.find(param.grad, moment)
                ]
        return old, waiting

    def _after_move(self, before: tuple[Tensor, list[Tensor]] | None) -> None:
        """Give gradients that wait the new scale: what is added to them carries it too."""
        if before is not None and before[1]:
            assert self._scale is not None
            groups = gradients.distinct(
                gradients.gather(list({id(p): p for p in before[1]}.values()))
            )
            gradients.multiply_(groups, self._scale / before[0])

    def _read_if_due(self, found: bool | None) -> None:
        due = len(self._history) >= UNREAD_LIMIT
        if due or (found is not None and self._history.known):
            self._count_history()

    def _move_scale(self, scale: Tensor, tracker: Tensor, flag: Tensor) -> None:
        move = torch._amp_update_scale_ if self._native else gradients.update_scale_
        before = scale.clone() if self._hysteresis > 1 else scale
        factors = (self._growth_factor, self._backoff_factor, self._growth_interval)
        move(scale, tracker, flag, *factors)
        if self._hysteresis > 1:
            # Overflows before the hysteresis-th since the last growth leave the scale alone.
            bad = flag != 0
            spent = self._hysteresis_spent + bad
            scale.copy_(torch.where(bad & (spent < self._hysteresis), before, scale))
            grew = ~bad & (tracker == 0)
            self._hysteresis_spent = torch.where(grew, torch.zeros_like(flag), spent.to(flag.dtype))

    def _read_history(self) -> None:
        self._count_history()
        self._history.tell(self._on_skip)

    def _count_history(self) -> None:
        value = self._history.read(self._max_consecutive_skips, self._scale)
        if value is not None:
            self._note_scale(value)

    def _collapse_error(self, states: Iterable[OptimizerState]) -> ScaleCollapseError:
        why, self._history.collapse = self._history.collapse, None
        optimizers = [state.optimizer for state in states if state.optimizer is not None]
        names = grad_names.names_of_nonfinite(optimizers, self._names())
        return ScaleCollapseError(
            f"{why} (scale {self.get_scale():g}, min_scale {self._min_scale:g}). "
            "Gradients that are not finite: "
            f"{grad_names.listed(names) or grad_names.elsewhere('those of an earlier step')}. "
            "No parameter was changed by these steps. Look for a loss or an input that is not "
            "finite, lower the learning rate, or use bf16; "
            "max_consecutive_skips=... waits longer"
        )

    def _names(self) -> dict[int, str]:
        model = self._model() if self._model is not None else None
        return {} if model is None else {id(p): name for name, p in model.named_parameters()}

    @property
    def steps(self) -> int:
        """Iterations that ended with no overflow. Reading may wait for the device."""
        self._read_history()
        return self._history.steps

    @property
    def skipped(self) -> int:
        """Iterations in which a gradient was not finite. Reading may wait for the device."""
        self._read_history()
        return self._history.skipped

    @property
    def consecutive_skips(self) -> int:
        """Overflows in a row up to now. Reading may wait for the device."""
        self._read_history()
        return self._history.consecutive

    def get_scale(self) -> float:
        """The scale now, 1.0 if disabled. Waits for the device."""
        if not self._enabled:
            return 1.0
        scale = self._get_scale_async()
        return self._init_scale if scale is None else float(scale.item())

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, more than 1."""
        self._growth_factor = rules.growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, between 0 and 1."""
        self._backoff_factor = rules.backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval; a run of clean iterations that is longer grows at the next."""
        self._growth_interval = rules.growth_interval(new_interval)
        self._init_growth_tracker = min(self._init_growth_tracker, new_interval - 1)
        if self._growth_tracker is not None:
            self._growth_tracker.clamp_(max=new_interval - 1)


def _evidence(
    states: list[OptimizerState], device: torch.device
) -> tuple[Tensor | None, bool | None]:
    """The flag of this iteration, and what the host knows of it already."""
    flags = [f for state in states for f in state.found_inf_per_device.values()]
    known = {state.found for state in states if state.found_inf_per_device}
    found = True if True in known else None if None in known else False
    return gradients.any_flag(flags, device), found


private.not_as_frames(__name__)
