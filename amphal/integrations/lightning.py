"""Lightning: precision plug-ins for Fabric and for its Trainer that run a plan.

They are Lightning's own mixed-precision plug-ins with the plan's autocast region and amphal's
scaler. Beyond those, gradients can be clipped with a fused optimizer, and ranks that hold shards
step or skip together. In a checkpoint the scaler's state has the name that Lightning gives it.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from .._front import Plan
from .._scaler import GradScaler
from ..contract import LOW_PRECISION
from ..errors import ArgumentError
from ._extra import framework, require_plan, require_scaler

if TYPE_CHECKING:
    from lightning.fabric.plugins.precision.amp import MixedPrecision as FabricPrecision
    from lightning.pytorch.plugins.precision.amp import MixedPrecision as TrainerPrecision

__all__ = ["fabric_precision", "trainer_precision"]

_NAMES = {
    torch.bfloat16: "bf16-mixed",
    torch.float16: "16-mixed",
    torch.float32: "32-true",
}


def fabric_precision(plan: Plan, *, scaler: GradScaler | None = None) -> FabricPrecision:
    """A precision plug-in for ``Fabric(plugins=...)``.

    Args:
        plan: its autocast region is where the module's forward runs.
        scaler: a scaler of your own settings; None makes one where the plan needs it.

    Raises:
        MissingExtraError: Lightning is not installed.
    """
    plan = require_plan(plan, "fabric_precision")  # before a framework is looked for
    require_scaler(scaler, "fabric_precision")
    made: FabricPrecision = _fabric_class()(plan, scaler)
    return made


def trainer_precision(plan: Plan, *, scaler: GradScaler | None = None) -> TrainerPrecision:
    """A precision plug-in for ``Trainer(plugins=...)``; otherwise as :func:`fabric_precision`."""
    plan = require_plan(plan, "trainer_precision")
    require_scaler(scaler, "trainer_precision")
    made: TrainerPrecision = _trainer_class()(plan, scaler)
    return made


def _set_up(plugin: Any, plan: Plan, scaler: GradScaler | None) -> None:
    """The attributes that Lightning's plug-ins have; their own constructors refuse float32."""
    plugin.plan = plan
    plugin.precision = _NAMES[plan.dtype]
    plugin.device = plan.device.type
    plugin.scaler = plan.grad_scaler() if scaler is None and plan.use_scaler else scaler


@functools.cache
def _fabric_class() -> Any:
    base: Any = framework("lightning.fabric.plugins.precision.amp", "lightning").MixedPrecision

    class PlanPrecision(base):  # type: ignore[misc]
        """Fabric's mixed precision, run by an :class:`amphal.Plan`."""

        def __init__(self, plan: Plan, scaler: GradScaler | None) -> None:
            _set_up(self, plan, scaler)

        def __reduce__(self) -> Any:  # the class is made in a function
            return functools.partial(fabric_precision, self.plan, scaler=self.scaler), ()

        def forward_context(self) -> AbstractContextManager[Any]:
            region: AbstractContextManager[Any] = self.plan.autocast()
            return region

        def convert_input(self, data: Any) -> Any:
            return data  # autocast casts what an op needs; the rest keeps its precision

        def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
            _look_at(optimizer, self.plan, self.scaler)
            if self.scaler is None:
                return optimizer.step(**kwargs)
            output = self.scaler.step(optimizer, **kwargs)
            self.scaler.update()
            return output

        def unscale_gradients(self, optimizer: Any) -> None:
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)

    return _named_as(base, PlanPrecision)


@functools.cache
def _trainer_class() -> Any:
    base: Any = framework("lightning.pytorch.plugins.precision.amp", "lightning").MixedPrecision

    class PlanPrecision(base):  # type: ignore[misc]
        """The Trainer's mixed precision, run by an :class:`amphal.Plan`."""

        def __init__(self, plan: Plan, scaler: GradScaler | None) -> None:
            _set_up(self, plan, scaler)

        def __reduce__(self) -> Any:  # the class is made in a function
            return functools.partial(trainer_precision, self.plan, scaler=self.scaler), ()

        def autocast_context_manager(self) -> torch.autocast:
            # No cache, as Lightning's own has it.
            region: torch.autocast = self.plan.autocast(cache_enabled=False)
            return region

        def clip_gradients(
            self, optimizer: Any, clip_val: Any = 0.0, *args: Any, **kw: Any
        ) -> None:
            if clip_val and self.scaler is not None and _unscales_itself(optimizer):
                self.scaler.unscale_(optimizer)  # Lightning leaves it to the optimizer's step
            super(base, self).clip_gradients(optimizer, clip_val, *args, **kw)

        def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            _look_at(optimizer, self.plan, self.scaler)
            return super().optimizer_step(optimizer, *args, **kwargs)

    return _named_as(base, PlanPrecision)


def _named_as(base: Any, made: Any) -> Any:
    """Lightning stores a plug-in's state under the name of its class, and finds it by that."""
    made.__qualname__ = base.__qualname__
    return made


def _look_at(optimizer: Any, plan: Plan, scaler: Any) -> None:
    """Before its step: refuse another device than the plan's, and share the scaler of shards."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    other = next((p.device for p in params if p.device.type != plan.device.type), None)
    if other is not None and plan.dtype in LOW_PRECISION:
        raise ArgumentError(
            f"the parameters are on {other}, and the plan is for {plan.device}, so they were "
            f"computed in full precision; call amphal.detect({other.type!r})"
        )
    # Plain parameters beside sharded ones can differ by rank.
    alone = isinstance(scaler, GradScaler) and scaler.process_group is None
    if alone and any(hasattr(param, "placements") for param in params):
        scaler.process_group = torch.distributed.group.WORLD


def _unscales_itself(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
