"""The rules for every value that enters a scaler, by argument, setter, ``update`` or state."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch

from .._choice import Choice, choice, choose
from .._torch import private
from ..contract import Hardware, ScalerSupport, guard, registry
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceNotAvailableError,
    ScalerStateError,
)
from . import gradients

__all__ = [
    "LARGEST",
    "SMALLEST",
    "flag",
    "integer",
    "number",
    "optimizer",
    "plan_for",
    "scale",
    "support_of",
]

SMALLEST = 2.0**-126
"""The least scale: float32's least normal number. The inverse of a smaller one may be inf."""

LARGEST = torch.finfo(torch.float32).max
"""The largest scale: growth that would exceed float32 does not happen."""


def number(name: str, value: object, above: float, below: float, rule: str) -> float:
    """A real number strictly between ``above`` and ``below``.

    Raises:
        ArgumentTypeError: not a number.
        ArgumentError: outside; ``rule`` says what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(
            f"{name} must be a number, {rule}, got {type(value).__name__} ({value!r})"
        )
    try:
        given = float(value)
    except OverflowError:  # an int beyond float's range, too long to be shown
        raise ArgumentError(f"{name} must be {rule}, got an int beyond 1e308") from None
    if not above < given < below:
        raise ArgumentError(f"{name} must be {rule}, got {value!r}")
    return given


def growth_factor(value: object) -> float:
    """The rule for ``growth_factor``."""
    return number("growth_factor", value, 1.0, math.inf, "more than 1 and finite")


def backoff_factor(value: object) -> float:
    """The rule for ``backoff_factor``."""
    return number("backoff_factor", value, 0.0, 1.0, "more than 0 and less than 1")


def integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """An int of at least ``least`` and at most ``most``."""
    bound = f"an int of {least} or more" if most is None else f"an int from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(f"{name} must be {bound}, got {type(value).__name__} ({value!r})")
    given = int(value)
    if given < least or (most is not None and given > most):
        raise ArgumentError(f"{name} must be {bound}, got {value!r}")
    return given


def growth_interval(value: object) -> int:
    """The rule for ``growth_interval``."""
    return integer("growth_interval", value, 1, 2**31 - 1)


def flag(name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(
            f"{name} must be True, False or None (as the plan says), "
            f"got {type(value).__name__} ({value!r})"
        )
    return value


def bounds(min_scale: object, max_scale: object) -> tuple[float, float]:
    """The two bounds, rounded to float32."""
    rule = f"from 2**-126 (whose inverse is finite) to {LARGEST:g}, float32's largest"
    values = []
    for name, value in (("min_scale", min_scale), ("max_scale", max_scale)):
        given = number(name, value, -math.inf, math.inf, rule)
        if not SMALLEST <= given <= LARGEST:
            raise ArgumentError(f"{name} must be {rule}, got {value!r}")
        values.append(gradients.float32(given))
    low, high = values
    if low > high:
        raise ArgumentError(
            f"min_scale must be at most max_scale, got {min_scale!r} and {max_scale!r}"
        )
    return low, high


def scale(name: str, value: object, low: float, high: float) -> float:
    """A scale inside the bounds."""
    rule = f"from min_scale ({low:g}) to max_scale ({high:g})"
    given = number(name, value, -math.inf, math.inf, rule)
    if not low <= gradients.float32(given) <= high:
        raise ArgumentError(f"{name} must be {rule}, got {value!r}")
    return given


def optimizer(value: Any) -> Any:
    """An optimizer: it has ``param_groups`` and ``step``."""
    if not hasattr(value, "param_groups") or not callable(getattr(value, "step", None)):
        raise ArgumentTypeError(
            "optimizer must be a torch.optim.Optimizer or wrap one (param_groups and step), "
            f"got {type(value).__name__} ({value!r})"
        )
    return value


def missing_scale(method: str) -> ScalerStateError:
    """The error of a method that was called before any loss was scaled."""
    return ScalerStateError(
        f"{method}() was called before scale(): call scaler.scale(loss).backward() first, "
        f"then scaler.{method}()"
    )


def plan_for(device: Any, enabled: bool | None) -> tuple[str, Choice | None]:
    """The device type and, unless the scaler is off in any case, the plan.

    Raises:
        ArgumentTypeError, UnknownDeviceError, DeviceNotAvailableError: as :func:`amphal.detect`.
    """
    if isinstance(device, Choice):
        return device.device.type, device
    if isinstance(device, Hardware):
        raise ArgumentTypeError(
            f"GradScaler() runs on a device that is here, and {device.name!r} is a description; "
            "pass a device or a plan"
        )
    if isinstance(device, numbers.Number):
        raise ArgumentTypeError(
            f"device must be a device or an amphal.Plan, got the number {device!r}; "
            "did you mean init_scale=...? The device comes first, as in torch.amp.GradScaler"
        )
    if enabled is False and device is not None:
        # "Off" asks nothing of the device, so it may be absent; it must be a device all the same.
        return registry.get_backend(choose.named_device(device)[0]).device_type, None
    if isinstance(device, str):
        choose.named_device(device)
    plan = choose.detect(device)
    return plan.device.type, plan


def support_of(plan: Choice) -> tuple[ScalerSupport, Any]:
    """What a scaler can count on there, and the vendor's own scaler class or None."""
    backend = registry.get_backend(plan.hardware.device_type)
    support = choice.facts(backend, plan.hardware)[1]
    vendor = None if support.detects_overflow else guard.vendor_scaler(backend)
    return support, vendor


def native_for_float16(device_type: str) -> bool:
    """Whether torch's kernels scale there; for a scaler whose plan has another dtype.

    Raises:
        ArgumentError: float16 needs the vendor's scaler there, or no scaler can see an overflow.
    """
    plan = choose.detect(device_type)
    support, vendor = support_of(plan)
    if not support.detects_overflow:
        how = (
            "needs its vendor's scaler: use amphal.detect(precision='fp16').grad_scaler()"
            if vendor is not None
            else "saturates instead of giving inf or NaN, and no scaler can see an overflow: use "
            "bf16 or fp32, or enabled=False to go unscaled"
        )
        raise ArgumentError(
            f"this loss comes from a float16 region, and {plan.hardware.name} ({plan.device}) {how}"
        )
    return support.native_kernels


def refuse_blind(plan: Choice) -> DeviceNotAvailableError | ArgumentError:
    """The error for fp16 with a scaler on hardware where nothing can see an overflow."""
    return ArgumentError(
        f"enabled=True was asked for with fp16 on {plan.hardware.name} ({plan.device}), which "
        "saturates instead of giving inf or NaN: no scaler can see an overflow there, and its "
        "backend brings no vendor scaler. Use another precision (amphal.detect(precision='fp32')), "
        "or leave enabled=None, which then does not scale"
    )


def new_scale(value: Any, low: float, high: float, current: torch.Tensor) -> float:
    """The value for ``update(new_scale)``; a tensor is read, which waits for the device."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.requires_grad or not value.dtype.is_floating_point:
            raise ArgumentError(
                "new_scale must be a number or a floating-point tensor of one element that "
                f"requires no grad, got shape {tuple(value.shape)}, {value.dtype}, "
                f"requires_grad={value.requires_grad}"
            )
        if value.device.type != current.device.type:
            raise ArgumentError(
                f"new_scale must be a number or lie on {current.device.type}, as the scale does, "
                f"got a tensor on {value.device}"
            )
        value = value.item()
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(
            "new_scale must be a number or a tensor of one element, "
            f"got {type(value).__name__} ({value!r})"
        )
    if value != value:
        raise ArgumentError("new_scale must be a number, got nan")
    return scale("new_scale", value, low, high)


private.not_as_frames(__name__)
