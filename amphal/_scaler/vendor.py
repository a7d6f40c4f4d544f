"""A vendor's scaler behind the interface of :class:`GradScaler`.

Some hardware saturates instead of overflowing: only its vendor's scaler, which reads a flag of the
device, can tell that a step must be skipped. It decides; this class adds what can be added.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._torch import private
from ..errors import ArgumentError, BackendError
from . import arguments as rules
from .outcome import StepOutcome
from .scaler import GradScaler

__all__ = ["VendorScaler"]

_OWN = {
    "min_scale": rules.SMALLEST,
    "max_scale": rules.LARGEST,
    "hysteresis": 1,
    "max_consecutive_skips": None,
    "process_group": None,
}


class VendorScaler(GradScaler):
    """What ``GradScaler(...)`` gives on hardware whose backend brings a vendor's scaler."""

    def __init__(self, device: Any = None, *args: Any, **kwargs: Any) -> None:
        given = [name for name, plain in _OWN.items() if kwargs.get(name, plain) != plain]
        plan = rules.plan_for(device, None)[1]
        assert plan is not None
        if given:
            raise ArgumentError(
                f"{', '.join(given)} cannot be had on {plan.hardware.name} ({plan.device}): an "
                "overflow there is seen by the vendor's scaler alone, which decides by itself"
            )
        super().__init__(plan, *args, **kwargs)
        vendor = rules.support_of(plan)[1]
        # torch's own means cuda where no device is named; older ones of vendors take no device.
        takes_device = "device" in inspect.signature(vendor).parameters
        self._vendor: Any = vendor(
            **({"device": plan.device.type} if takes_device else {}),
            init_scale=self._init_scale,
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
            enabled=self._enabled,
        )
        if self._enabled and not self._vendor.is_enabled():
            raise BackendError(
                f"the vendor's scaler {vendor.__qualname__} switched itself off on {plan.device}: "
                "fp16 gradients would go unscaled. Use another precision, or another version of it"
            )

    def scale(self, outputs: Any) -> Any:
        """Multiply by the vendor's scale."""
        return self._vendor.scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale as the vendor does."""
        self._vendor.unscale_(rules.optimizer(optimizer))

    def clip_grad_norm_(
        self,
        optimizer_or_params: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Unscale by the vendor's scaler, then clip as torch does."""
        optimizer = rules.optimizer(optimizer_or_params)
        self._vendor.unscale_(optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step or skip as the vendor decides. No closures."""
        result = self._vendor.step(rules.optimizer(optimizer), *args, **kwargs)
        found = (
            list(self._vendor._found_inf_per_device(optimizer).values()) if self._enabled else []
        )
        outcome = StepOutcome(any(bool(flag.item()) for flag in found))
        self._finish_step(optimizer, outcome)
        self._history.append(float(outcome.skipped))
        return result

    def step_all(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[Any]:
        """Only for one optimizer: the vendor's scaler decides for each by itself."""
        together = list(optimizers)
        if len(together) != 1:
            raise BackendError(
                f"step_all() of {len(together)} optimizers cannot be had on this device: the "
                "vendor's scaler decides for each by itself; step them one by one"
            )
        return [self.step(together[0])]

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the vendor's scale."""
        self._vendor.update() if new_scale is None else self._vendor.update(new_scale)
        self._read_history()

    def get_scale(self) -> float:
        """The vendor's scale."""
        return float(self._vendor.get_scale())

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, more than 1."""
        super().set_growth_factor(new_factor)
        self._vendor.set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, between 0 and 1."""
        super().set_backoff_factor(new_factor)
        self._vendor.set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval."""
        super().set_growth_interval(new_interval)
        self._vendor.set_growth_interval(new_interval)

    def state_dict(self) -> dict[str, Any]:
        """The vendor's state."""
        state: dict[str, Any] = self._vendor.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's entries of a state into the vendor's scaler; a bad one changes nothing.

        What only the vendor's own states have (torch_npu's ``dynamic``) stays as it is where the
        state is another scaler's.
        """
        super().load_state_dict(state_dict)
        if state_dict:
            self._vendor.load_state_dict({**self._vendor.state_dict(), **state_dict})


GradScaler._for_vendor = VendorScaler


private.not_as_frames(__name__)
