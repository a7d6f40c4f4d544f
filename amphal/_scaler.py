"""``amphal.GradScaler``: torch's gradient scaler that never corrupts, tells more and costs less.

What it adds lies beside it: the rules for values in ``_scaler_rules``, the gradients in ``_grads``,
clipping in ``_clip``, closures in ``_closure``, outcomes and counters in ``_outcome``, state in
``_scaler_state``, vendor's scalers in ``_vendor_scaler``.

The host keeps a lower bound of the scale that lies on the device. While it is 1 or more, unscaling
cannot overflow and torch's kernels are exact as they are; below, the products are checked as well.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from . import _clip, _closure, _grads, _scaler_state
from . import _scaler_rules as rules
from ._detect import DeviceLike, Plan
from ._outcome import AT_FLOOR, UNREAD_LIMIT, History, StepOutcome
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingCallError,
    ScaleCollapseError,
    ScalerStateError,
)

__all__ = ["GradScaler"]

State = dict[str, Any]


class GradScaler(torch.amp.GradScaler):
    """Scales the loss so that small fp16 gradients survive, and guards the optimizer's step.

    A drop-in for ``torch.amp.GradScaler``: an instance of it, with its order of arguments and its
    numbers bit for bit. Beyond it: bounds, an outcome of each step, closures, clipping in one read
    of the gradients, and one decision for several optimizers and ranks.

    Args:
        device: None (what :func:`amphal.detect` chooses), a device, or a :class:`Plan`.
        init_scale: the first scale.
        growth_factor, backoff_factor, growth_interval: the scale is multiplied by
            ``backoff_factor`` (between 0 and 1) when a gradient is not finite, and by
            ``growth_factor`` (more than 1) after ``growth_interval`` clean iterations in a row.
        enabled: None scales where the plan needs it; False makes every method do the plain thing.
        min_scale, max_scale: bounds of the scale. By default all that float32 can invert and hold.
        hysteresis: at which overflow to back off: 1 is at once. Counted anew after each growth.
        max_consecutive_skips: the most overflows in a row. None stops at the first overflow with
            the scale at ``min_scale``; a number waits for that many, at the floor too.
        process_group: ranks of this group step or skip together, by one all-reduce a step. All of
            them must then call :meth:`step` equally often. None: no collective.
        model: names parameters in error messages; held weakly.
        on_skip: called with the number of each skipped iteration when the host learns of it: in
            :meth:`update`, or with fused optimizers at the next read of a counter and after 128
            iterations at most.

    Raises:
        ScalerArgumentError, ArgumentTypeError: a value that is not allowed; see each rule.
        UnknownDeviceError, DeviceNotAvailableError: no such device, or not here.
    """

    def __new__(cls, device: Any = None, *args: Any, **kwargs: Any) -> GradScaler:
        """The vendor's scaler behind this interface, where only that can see an overflow."""
        enabled = args[4] if len(args) > 4 else kwargs.get("enabled")
        if cls is GradScaler and enabled is not False:
            plan = rules.plan_for(device, enabled)[1]
            if plan is not None and plan.dtype is torch.float16 and rules.support_of(plan)[1]:
                from ._vendor_scaler import VendorScaler

                return object.__new__(VendorScaler)
        return object.__new__(cls)

    def __init__(
        self,
        device: DeviceLike | Plan | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool | None = None,
        *,
        min_scale: float = rules.SMALLEST,
        max_scale: float = rules.LARGEST,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
        process_group: Any = None,
        model: torch.nn.Module | None = None,
        on_skip: Callable[[int], object] | None = None,
    ) -> None:
        if enabled is not None:
            rules.flag("enabled", enabled)
        low, high = rules.bounds(min_scale, max_scale)
        self._init_scale = rules.scale("init_scale", init_scale, low, high)
        self._growth_factor = rules.growth_factor(growth_factor)
        self._backoff_factor = rules.backoff_factor(backoff_factor)
        self._growth_interval = rules.growth_interval(growth_interval)
        self._min_scale, self._max_scale = low, high
        self._hysteresis = rules.integer("hysteresis", hysteresis, 1)
        self._max_consecutive_skips = (
            None
            if max_consecutive_skips is None
            else rules.integer("max_consecutive_skips", max_consecutive_skips, 0)
        )
        if on_skip is not None and not callable(on_skip):
            raise ArgumentTypeError(f"on_skip must be a function of one int, got {on_skip!r}")
        self._on_skip = on_skip
        self._model = _weak_model(model)
        self.process_group = process_group

        self._device, plan = rules.plan_for(device, enabled)
        self._enabled = plan.use_scaler if enabled is None and plan else bool(enabled)
        self._native = True
        if self._enabled and plan is not None:
            support, vendor = rules.support_of(plan)
            if plan.dtype is torch.float16 and not support.detects_overflow and vendor is None:
                raise rules.refuse_blind(plan)
            self._native = support.native_kernels
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._init_growth_tracker = 0
        self._per_optimizer_states: dict[int, State] = defaultdict(_refresh_per_optimizer_state)
        self._start()

    def _start(self) -> None:
        """What an iteration boundary looks like; also after unpickling."""
        self._history = History()
        self._outcomes: weakref.WeakKeyDictionary[Any, StepOutcome] = weakref.WeakKeyDictionary()
        self._kept_state: dict[str, Any] = {}
        self._hysteresis_spent: Any = 0.0  # a float32 scalar on the scale's device once it counts
        self._scale_calls = self._calls_at_update = 0
        self._stepped = False
        self._seen: tuple[Tensor | None, int] = (None, 0)
        self._lower = 0.0

    # ---- the scale -------------------------------------------------------------------------

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        with torch.inference_mode(False):
            self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
            self._growth_tracker = torch.full(
                (), self._init_growth_tracker, dtype=torch.int32, device=dev
            )
        self._note_scale(_grads.float32(self._init_scale))

    def _note_scale(self, lower: float) -> None:
        """The scale was just written by this scaler and is at least ``lower``."""
        assert self._scale is not None
        self._lower = lower if lower > 0.0 else 0.0  # also for NaN
        self._seen = (self._scale, self._scale._version)

    def _lower_bound(self) -> float:
        """A lower bound of the scale without asking the device; 0 if others wrote to the scale."""
        if self._scale is not None:
            value = _grads.host_value(self._scale)
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

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or every tensor in nested lists, tuples and iterables, by the scale.

        A float16 or bfloat16 scalar becomes float32. When disabled, ``outputs`` comes back as is.

        Raises:
            ArgumentError: something that is neither a tensor nor an iterable of tensors.
        """
        if not self._enabled:
            return outputs
        self._scale_calls += 1
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

    # ---- checking and unscaling ------------------------------------------------------------

    def _state_of(self, optimizer: Any) -> State:
        state = self._per_optimizer_states[id(optimizer)]
        state["optimizer"] = optimizer  # also keeps its id from being used again
        return state

    def _names(self) -> dict[int, str]:
        model = self._model() if self._model is not None else None
        return {} if model is None else {id(p): name for name, p in model.named_parameters()}

    def _gather(self, optimizer: Any, *, allow_fp16: bool = False) -> _grads.Groups:
        groups = _grads.gather(p for group in optimizer.param_groups for p in group["params"])
        if not allow_fp16 and any(dtype is torch.float16 for _, dtype, _ in groups):
            names = _grads.names_of_half(optimizer, self._names())
            raise ArgumentError(
                "the parameters are float16, so their gradients cannot be unscaled: "
                f"{_clip.listed(names)}. Keep the parameters in float32 (no model.half()) and let "
                "autocast cast them"
            )
        return groups

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """torch's inner hook: unscale every gradient, give a flag per device."""
        groups = self._gather(optimizer, allow_fp16=allow_fp16)
        return _grads.unscale_(
            groups, inv_scale, native=self._native, may_overflow=self._lower_bound() < 1.0
        )

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Tensor]:
        """torch's hook for fused optimizers: the flags, with the gradients as they are."""
        scale, _ = self._check_scale_growth_tracker("step")
        groups = self._gather(optimizer)
        state = self._state_of(optimizer)
        sure = self._lower_bound() >= 1.0
        if _grads.is_plain(groups) and not (sure and self._native):
            state["found_inf_per_device"] = _grads.probe(groups, scale)
        elif sure:
            state["found_inf_per_device"] = _grads.check(groups)
        else:
            self.unscale_(optimizer)
        flags: dict[torch.device, Tensor] = state["found_inf_per_device"]
        return flags

    def _found_inf_per_device(self, optimizer: Any) -> dict[Any, Tensor]:
        flags: dict[torch.device, Tensor] = self._state_of(optimizer)["found_inf_per_device"]
        return flags

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, in place, and check them. No sync.

        Optional: :meth:`step` does it. Needed only to look at the gradients or change them before;
        to clip them, :meth:`clip_grad_norm_` is cheaper.

        Raises:
            MissingCallError: no loss was scaled yet.
            ScalerStateError: unscaled, clipped or stepped already since the last :meth:`update`.
            ArgumentError: the parameters are float16; the message names them.
        """
        rules.optimizer(optimizer)
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer)
        if state["stage"] is not OptState.READY:
            raise out_of_order("unscale_", state)
        # The float32 reciprocal is the double one rounded: 53 bits are more than 2 x 24 + 1.
        inverse = scale.reciprocal()
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, inverse, inverse, False)
        state["stage"] = OptState.UNSCALED

    def clip_grad_norm_(
        self,
        optimizer_or_params: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Unscale, check and clip the gradients in one read of them; no host sync.

        Stands for ``unscale_`` and ``torch.nn.utils.clip_grad_norm_``. With a fused optimizer
        nothing is written here: ``step`` divides by the scale and the clipping at once, and
        ``.grad`` holds the clipped gradients after it. With others there is one write.

        Args:
            optimizer_or_params: the optimizer; or parameters, whose gradients are then clipped
                and, unless they were unscaled, stay scaled until the step.
            max_norm: the most that the norm of the unscaled gradients may be, 0 or more.
            norm_type: the order of the norm, more than 0; ``inf`` for the largest magnitude.
            error_if_nonfinite: raise if the norm is not finite (reads it: one host sync).

        Returns:
            The norm of the unscaled gradients before clipping, a scalar tensor. Not finite after
            an overflow; the step is then skipped.

        With a 2-norm in one read, gradients whose *scaled* norm exceeds float32's range (2**64 or
        more for the 2-norm) count as an overflow with a fused optimizer; with others the exact
        check follows before the decision.

        Raises:
            MissingCallError, ScalerStateError: before scale(), after step(), or clipped already.
            NonFiniteGradientError: as asked by ``error_if_nonfinite``; nothing was changed.
            ArgumentError, ArgumentTypeError: a value that is not allowed.
        """
        return _clip.clip(self, optimizer_or_params, max_norm, norm_type, error_if_nonfinite)

    # ---- stepping --------------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step ``optimizer`` with unscaled gradients, or skip it if any is inf or NaN.

        Args:
            optimizer: the optimizer; ``outcome(optimizer)`` then says what it did.
            args, kwargs: passed on to ``optimizer.step``. With a closure (LBFGS, SAM) every
                evaluation is unscaled and checked; the closure must call
                ``scaler.scale(loss).backward()`` and return the loss as it is. One that is not
                finite skips, and puts the parameters and the optimizer's state back as they were;
                for that a copy of both is held during the step.

        Returns:
            What ``optimizer.step`` returned; None if it was skipped.

        Raises:
            MissingCallError: no loss was scaled yet, or a closure did not scale its own.
            ScalerStateError: stepped already since the last :meth:`update`.
            ArgumentError: the parameters are float16; the message names them.
        """
        rules.optimizer(optimizer)
        if not self._enabled:
            result = optimizer.step(*args, **kwargs)
            self._finish_step(optimizer, StepOutcome(False))
            return result
        closure = kwargs.get("closure", args[0] if args else None)
        if callable(closure):
            return _closure.step(self, optimizer, closure, args, kwargs)
        return self._step_together([optimizer], args, kwargs)[0]

    def step_all(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[Any]:
        """Step several optimizers, or skip all of them if any gradient of any is inf or NaN.

        One host sync for all of them together, none if all are fused; one collective with a
        process group. Otherwise as :meth:`step`.
        """
        together = [rules.optimizer(optimizer) for optimizer in optimizers]
        if not together or len({id(o) for o in together}) != len(together):
            raise ArgumentError(
                f"step_all() takes one or more different optimizers, got {len(together)}"
                + (" with one of them twice" if together else "")
            )
        if not self._enabled:
            return [self.step(optimizer) for optimizer in together]
        return self._step_together(together, (), {})

    def _step_together(
        self,
        optimizers: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        veto: Tensor | None = None,
    ) -> list[Any]:
        """One decision for all; ``veto`` is a flag that skips without counting as an overflow."""
        self._check_scale_growth_tracker("step")
        states = [self._state_of(optimizer) for optimizer in optimizers]
        for state in states:
            if state["stage"] is OptState.STEPPED:
                raise out_of_order("step", state)
        for optimizer, state in zip(optimizers, states, strict=True):
            if state["stage"] is OptState.READY and not _takes_scaler(optimizer):
                if is_fused(optimizer):
                    self._check_inf_per_device(optimizer)
                else:
                    self.unscale_(optimizer)
        for state in states:
            state["nothing"] = not state["found_inf_per_device"]
        flag = self._agree(states)
        skip = None
        if flag is not None and any(map(needs_host, optimizers)):
            flag, skip = self._ask(states, flag, veto)
        gate = flag if veto is None or flag is None else torch.maximum(flag, veto)
        return [
            self._step_one(optimizer, state, gate, skip, args, kwargs)
            for optimizer, state in zip(optimizers, states, strict=True)
        ]

    def _agree(self, states: list[State]) -> Tensor | None:
        """One flag for all these optimizers, and for all ranks if there is a group."""
        assert self._scale is not None
        flags = [f for state in states for f in state["found_inf_per_device"].values()]
        flag = _grads.any_flag(flags, self._scale.device)
        alone = self._process_group is None
        if not alone:
            flag = self._all_reduce(torch.zeros_like(self._scale) if flag is None else flag)
        if flag is not None and (len(states) > 1 or len(flags) > 1 or not alone):
            _set_flag(states, flag)
        return flag

    def _ask(self, states: list[State], flag: Tensor, veto: Tensor | None) -> tuple[Tensor, bool]:
        """Let the host know the decision: one sync. The flag, and whether to skip."""
        if veto is None:
            found = skip = bool(flag.item())
        else:
            code = int((flag + 2 * veto.to(flag.device)).item())  # both in one transfer
            found, skip = bool(code & 1), bool(code)
        if found and self._process_group is None and any("recheck" in s for s in states):
            exact = _clip.recheck(self, states)
            if exact is not None:
                flag, found = exact, bool(exact.item())
                _set_flag(states, flag)
                skip = found or (veto is not None and bool(veto.item()))
        for state in states:
            state["found"] = found
        return flag, skip

    def _all_reduce(self, flag: Tensor) -> Tensor:
        if self._process_group is _scaler_state.LOST:
            raise ScalerStateError(
                "this scaler had a process group when it was pickled, which cannot travel; "
                "set scaler.process_group to the group of this process, or to None"
            )
        import torch.distributed as dist

        flag = flag.clone()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._process_group)
        return flag

    def _step_one(
        self,
        optimizer: Any,
        state: State,
        flag: Tensor | None,
        skip: bool | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        result = None
        if _takes_scaler(optimizer):
            result = self._step_with_scaler(optimizer, args, kwargs)
            flag = _grads.any_flag(state["found_inf_per_device"].values(), self._scale.device)  # type: ignore[union-attr]
            outcome = StepOutcome(flag if flag is not None else False)
        elif state["nothing"]:
            outcome = StepOutcome(False, nothing_to_do=True)
        else:
            assert flag is not None
            outcome = StepOutcome(flag if skip is None else skip)
            if not is_fused(optimizer):
                result = self._maybe_opt_step(optimizer, {**state, "skip": skip}, *args, **kwargs)
            elif not skip:
                result = self._step_fused(optimizer, state, flag, args, kwargs)
        state["stage"] = OptState.STEPPED
        self._finish_step(optimizer, outcome)
        return result

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: State, *args: Any, **kwargs: Any
    ) -> Any:
        """torch's inner hook: step unless a flag is set."""
        skip = optimizer_state.get("skip")
        if skip is None:
            skip = any(v.item() for v in optimizer_state["found_inf_per_device"].values())
        return None if skip else optimizer.step(*args, **kwargs)

    def _step_fused(
        self,
        optimizer: Any,
        state: State,
        flag: Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Hand the divisor and the flag to an optimizer that unscales and skips by itself."""
        divisor = state.get("divisor")
        if state["stage"] is OptState.READY:
            divisor = self._get_scale_async()
        own = getattr(optimizer, "grad_scale", None)  # one that the user has set already
        if own is not None:
            divisor = own if divisor is None else divisor * own
        optimizer.grad_scale, optimizer.found_inf = divisor, flag
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale
            del optimizer.found_inf

    def _step_with_scaler(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        warnings.warn(
            f"{type(optimizer).__name__}.step takes grad_scaler=, which torch is about to stop "
            "passing; let it read the attributes grad_scale and found_inf instead",
            FutureWarning,
            stacklevel=5,
        )
        return optimizer.step(*args, **{**kwargs, "grad_scaler": self})

    def _finish_step(self, optimizer: Any, outcome: StepOutcome) -> None:
        self._outcomes[optimizer] = outcome
        self._stepped = True
        if not outcome.nothing_to_do:
            drop_stale_casts()

    # ---- after the step --------------------------------------------------------------------

    def outcome(self, optimizer: torch.optim.Optimizer) -> StepOutcome:
        """What the latest :meth:`step` of ``optimizer`` did, to be read at any time later.

        Raises:
            MissingCallError: this scaler has not stepped it yet.
        """
        try:
            return self._outcomes[optimizer]
        except (KeyError, TypeError):
            raise MissingCallError(
                "outcome() has nothing to tell: this scaler has not stepped the "
                f"{type(optimizer).__name__}; call scaler.step(optimizer) first"
            ) from None

    def scheduler_step(self, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
        """``scheduler.step(*args, **kwargs)`` if the latest step of its optimizer changed weights.

        Reads the outcome, which with a fused optimizer waits for the device.

        Returns:
            Whether the scheduler was advanced.
        """
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None or not callable(getattr(scheduler, "step", None)):
            raise ArgumentTypeError(
                "scheduler must be a torch.optim.lr_scheduler (it has an optimizer and step), "
                f"got {type(scheduler).__name__} ({scheduler!r})"
            )
        stepped = self.outcome(optimizer).stepped
        if stepped:
            scheduler.step(*args, **kwargs)
        return stepped

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration: back the scale off or let it grow. No host sync of its own.

        With fused optimizers the host learns of overflows when a counter or an outcome is read,
        and after 64 iterations at most, by one read. Until then nothing can be written wrongly:
        the decision is the device's.

        Args:
            new_scale: set the scale to this, inside the bounds, instead.

        Raises:
            MissingCallError: nothing was stepped or unscaled since the last update.
            ScaleCollapseError: overflows at the floor, or too many in a row. The iteration has
                ended as usual; the parameters are as they were before it.
            ScalerArgumentError, ArgumentTypeError: ``new_scale`` is no scale; nothing was changed.
        """
        if not self._enabled:
            if self._stepped:
                self._stepped = False
                self._history.append(0.0)
                self._read_history()
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states
        if new_scale is not None:
            value = _scaler_state.new_scale(self, new_scale, scale)
            scale.fill_(value)
            self._note_scale(_grads.float32(value))
        else:
            self._advance(scale, tracker, list(states.values()))
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._calls_at_update = self._scale_calls
        if self._history.collapse is not None:
            raise self._collapse_error(states.values())

    def _advance(self, scale: Tensor, tracker: Tensor, states: list[State]) -> None:
        flags = [f for state in states for f in state["found_inf_per_device"].values()]
        flag = _grads.any_flag(flags, scale.device)
        if flag is None:
            if not any(state["stage"] is not OptState.READY for state in states):
                raise MissingCallError(
                    "update() found no optimizer that was stepped or unscaled since the last "
                    "update: call scaler.step(optimizer) first"
                )
            return  # no gradient anywhere: no evidence for either direction
        known = {state.get("found") for state in states if state["found_inf_per_device"]}
        found = True if True in known else None if None in known else False
        lower = self._lower_bound()
        record: float | Tensor = flag if found is None else float(found)
        if found is not False and lower <= self._min_scale:  # then it may be at the floor
            at_floor = ~(scale > self._min_scale)
            if found is None:
                record = flag * (1 + at_floor.to(flag.dtype))
            elif at_floor.item():
                record = AT_FLOOR
        self._move_scale(scale, tracker, flag)
        if found is not False:
            lower *= self._backoff_factor
        if lower < self._min_scale or self._max_scale < rules.LARGEST:
            scale.clamp_(self._min_scale, self._max_scale)
            lower = max(lower, self._min_scale) if lower else 0.0
        self._note_scale(lower)
        self._history.append(record)
        if found is not None or len(self._history) >= UNREAD_LIMIT:
            if found and lower < 1.0:
                # Rare, and the host has waited in this iteration anyway: know the scale again.
                self._note_scale(scale.item())
            if self._history.known or len(self._history) >= UNREAD_LIMIT:
                self._read_history()

    def _move_scale(self, scale: Tensor, tracker: Tensor, flag: Tensor) -> None:
        move = torch._amp_update_scale_ if self._native else _grads.update_scale_
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
        value = self._history.read(self._max_consecutive_skips, self._scale, self._on_skip)
        if value is not None:
            self._note_scale(value)

    def _collapse_error(self, states: Iterable[State]) -> ScaleCollapseError:
        why, self._history.collapse = self._history.collapse, None
        optimizers = [state["optimizer"] for state in states if "optimizer" in state]
        names = _grads.names_of_nonfinite(optimizers, self._names())
        return ScaleCollapseError(
            f"{why} (scale {self.get_scale():g}, min_scale {self._min_scale:g}). "
            f"Gradients that are not finite: {_clip.listed(names) or 'those of an earlier step'}. "
            "No parameter was changed by these steps. Look for a loss or an input that is not "
            "finite, lower the learning rate, or use bf16; "
            "max_consecutive_skips=... waits longer"
        )

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

    # ---- settings --------------------------------------------------------------------------

    @property
    def process_group(self) -> Any:
        """The group whose ranks step or skip together, or None."""
        return self._process_group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        if group is not None and not _is_process_group(group):
            raise ArgumentTypeError(
                "process_group must be a torch.distributed.ProcessGroup or None, "
                f"got {type(group).__name__} ({group!r})"
            )
        self._process_group = group

    @property
    def min_scale(self) -> float:
        """The floor of the scale."""
        return self._min_scale

    @property
    def max_scale(self) -> float:
        """The ceiling of the scale."""
        return self._max_scale

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

    def get_scale(self) -> float:
        """The scale now, 1.0 if disabled. Waits for the device."""
        if not self._enabled:
            return 1.0
        scale = self._get_scale_async()
        return self._init_scale if scale is None else float(scale.item())

    # ---- state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers, for a checkpoint at the end of an iteration.

        torch's five entries, which ``torch.amp.GradScaler`` loads too, and one of this package's.
        A disabled scaler gives what was loaded into it, or an empty dict. Waits for the device.
        """
        return _scaler_state.pack(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this scaler or of torch's own, from any device.

        An empty state (of a disabled scaler) leaves an enabled one as it is; a disabled one keeps
        the state for :meth:`state_dict`.

        Raises:
            StateDictError: not a state, or one outside this scaler's bounds; nothing was changed.
        """
        _scaler_state.load(self, state_dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return _scaler_state.rebuild, (type(self), self.__getstate__())

    def __getstate__(self) -> dict[str, Any]:
        return _scaler_state.freeze(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        _scaler_state.thaw(self, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradScaler:
        copy: GradScaler = _scaler_state.rebuild(type(self), self.__getstate__())
        copy._process_group, copy._model = self._process_group, self._model
        return copy


def drop_stale_casts() -> None:
    """Inside a region, forget autocast's casts of the weights: the weights have changed."""
    inside = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    if inside:
        torch.clear_autocast_cache()


def _weak_model(model: Any) -> weakref.ref[torch.nn.Module] | None:
    if model is None:
        return None
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"model must be a torch.nn.Module or None, got {type(model).__name__} ({model!r})"
        )
    return weakref.ref(model)


def _is_process_group(group: Any) -> bool:
    import torch.distributed as dist

    return group is _scaler_state.LOST or (
        dist.is_available() and isinstance(group, dist.ProcessGroup)
    )


def is_fused(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def needs_host(optimizer: Any) -> bool:
    """Whether the host must know the decision before it calls the optimizer's step."""
    if not is_fused(optimizer):
        return True
    for group in optimizer.param_groups:
        if group.get("momentum"):
            # Skipping its first step by itself, torch's fused SGD leaves a momentum buffer of
            # memory that nobody wrote, and steps with it next time (2.6 to 2.13).
            first = next((p for p in group["params"] if p.grad is not None), None)
            if first is not None and optimizer.state.get(first, {}).get("momentum_buffer") is None:
                return True
    return False


_signatures: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _takes_scaler(optimizer: Any) -> bool:
    """torch's older contract: a fused optimizer whose ``step`` takes ``grad_scaler=``."""
    if not is_fused(optimizer):
        return False
    step = getattr(optimizer.step, "__func__", optimizer.step)
    try:
        return _signatures[step]
    except (KeyError, TypeError):
        answer = "grad_scaler" in inspect.signature(optimizer.step).parameters
        try:
            _signatures[step] = answer
        except TypeError:
            pass  # a callable that cannot be referred to weakly: asked again each time
        return answer


def _set_flag(states: list[State], flag: Tensor) -> None:
    for state in states:
        state.setdefault("own", state["found_inf_per_device"])
        state["found_inf_per_device"] = {flag.device: flag}


def out_of_order(method: str, state: State) -> ScalerStateError:
    if state["stage"] is OptState.STEPPED:
        return ScalerStateError(
            f"{method}() was called after step() of the same optimizer: "
            "call scaler.update() first, which ends the iteration"
        )
    done = "clip_grad_norm_()" if "divisor" in state or "recheck" in state else "unscale_()"
    return ScalerStateError(
        f"{method}() was called after {done}, which has unscaled this optimizer's gradients "
        "already: call it once for all micro-batches together, then scaler.step(optimizer) and "
        "scaler.update()"
    )
