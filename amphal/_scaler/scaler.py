"""``amphal.GradScaler``: torch's gradient scaler that never corrupts, tells more and costs less.

Its parts: the scale itself (``scale``), checking and stepping (``step``), ``gradients``, ``clip``,
``closure``, outcomes and counters (``outcome``), the rules for values (``arguments``) and
``state_dict``.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from .._choice import Choice
from .._torch import drop_casts_after_each_step, private
from ..contract import DeviceLike
from ..errors import ArgumentError, ArgumentTypeError, ScalerStateError
from . import arguments as rules
from . import clip
from . import closure as closure_steps
from . import state_dict as states
from .optimizer_state import OptimizerState
from .optimizers import out_of_order
from .outcome import STEPPED, StepOutcome
from .scale import LOST
from .step import Stepper

__all__ = ["GradScaler"]


class GradScaler(Stepper):
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
        enabled: None scales where the plan needs it, or where a loss comes from a float16 region;
            False makes every method do the plain thing.
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
        ArgumentError, ArgumentTypeError: a value that is not allowed; see each rule.
        UnknownDeviceError, DeviceNotAvailableError: no such device, or not here.
    """

    _for_vendor: type[GradScaler]
    """What stands for a vendor's scaler; ``vendor`` names itself here."""

    def __new__(cls, device: Any = None, *args: Any, **kwargs: Any) -> GradScaler:
        """The vendor's scaler behind this interface, where only that can see an overflow."""
        enabled = args[4] if len(args) > 4 else kwargs.get("enabled")
        if cls is GradScaler and enabled is not False:
            plan = rules.plan_for(device, enabled)[1]
            if plan is not None and plan.dtype is torch.float16 and rules.support_of(plan)[1]:
                return object.__new__(cls._for_vendor)
        return object.__new__(cls)

    def __init__(
        self,
        device: DeviceLike | Choice | None = None,
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
        # Off because the plan has another dtype than float16: a region need not have the plan's.
        self._follows = enabled is None and plan is not None and plan.dtype is not torch.float16
        self._native = True
        if self._enabled and plan is not None:
            support, vendor = rules.support_of(plan)
            if plan.dtype is torch.float16 and not support.detects_overflow and vendor is None:
                raise rules.refuse_blind(plan)
            self._native = support.native_kernels
        self._scale: Tensor | None = None
        self._growth_tracker: Tensor | None = None
        self._init_growth_tracker = 0
        self._per_optimizer_states = defaultdict(OptimizerState)
        self._start()
        drop_casts_after_each_step()

    @private.out_of_graphs
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
        check follows before the decision, unless ranks decide together. What
        ``error_if_nonfinite`` finds on one rank of a process group is raised on all of them.

        Raises:
            ScalerStateError, ScalerStateError: before scale(), after step(), or clipped already.
            NonFiniteGradientError: as asked by ``error_if_nonfinite``; nothing was changed.
            ArgumentError, ArgumentTypeError: a value that is not allowed, or shards of FSDP1.
        """
        return clip.clip(self, optimizer_or_params, max_norm, norm_type, error_if_nonfinite)

    @private.out_of_graphs
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
            ScalerStateError: no loss was scaled yet, or a closure did not scale its own.
            ScalerStateError: stepped already since the last :meth:`update`.
            ArgumentError: the parameters are float16; the message names them.
        """
        rules.optimizer(optimizer)
        closure = kwargs.get("closure", args[0] if args else None)
        if not self._enabled:
            state = self._state_of(optimizer)
            if state.stage is OptState.STEPPED:
                raise out_of_order("step", state)
            if callable(closure):
                fresh = closure_steps.fresh_casts(closure)
                args, kwargs = closure_steps.replaced(closure, fresh, args, kwargs)
            result = optimizer.step(*args, **kwargs)
            state.stage = OptState.STEPPED
            self._finish_step(optimizer, STEPPED)
            return result
        if callable(closure):
            return closure_steps.step(self, optimizer, closure, args, kwargs)
        return self._step_together([optimizer], args, kwargs)[0]

    @private.out_of_graphs
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
            for state in map(self._state_of, together):  # refuse before any of them is stepped
                if state.stage is OptState.STEPPED:
                    raise out_of_order("step", state)
            return [self.step(optimizer) for optimizer in together]
        return self._step_together(together, (), {})

    def outcome(self, optimizer: torch.optim.Optimizer) -> StepOutcome:
        """What the latest :meth:`step` of ``optimizer`` did, to be read at any time later.

        Raises:
            ScalerStateError: this scaler has not stepped it yet.
        """
        outcome = self._outcomes.get(optimizer)
        if outcome is None:
            raise ScalerStateError(
                "outcome() has nothing to tell: this scaler has not stepped the "
                f"{type(optimizer).__name__}; call scaler.step(optimizer) first"
            )
        return outcome

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

    @property
    def process_group(self) -> Any:
        """The group whose ranks step or skip together, or None."""
        return self._process_group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        if group is not None and group is not LOST:
            from .._choice import require_group  # few scalers have a group

            require_group(group)
        self._process_group = group

    @property
    def min_scale(self) -> float:
        """The floor of the scale."""
        return self._min_scale

    @property
    def max_scale(self) -> float:
        """The ceiling of the scale."""
        return self._max_scale

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers, for a checkpoint at the end of an iteration.

        torch's five entries, which ``torch.amp.GradScaler`` loads too, and one of this package's.
        A disabled scaler gives what was loaded into it, or an empty dict. Waits for the device.
        """
        return states.pack(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this scaler or of torch's own, from any device.

        An empty state (of a disabled scaler) leaves an enabled one as it is; a disabled one keeps
        the state for :meth:`state_dict`.

        Raises:
            StateDictError: not a state, or one outside this scaler's bounds; nothing was changed.
        """
        states.load(self, state_dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return states.rebuild, (type(self), self.__getstate__())

    def __getstate__(self) -> dict[str, Any]:
        return states.freeze(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        states.thaw(self, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradScaler:
        copy: GradScaler = states.rebuild(type(self), self.__getstate__())
        copy._process_group, copy._model = self._process_group, self._model
        return copy


def _weak_model(model: Any) -> weakref.ref[torch.nn.Module] | None:
    if model is None:
        return None
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"model must be a torch.nn.Module or None, got {type(model).__name__} ({model!r})"
        )
    return weakref.ref(model)


private.not_as_frames(__name__)
