"""What :func:`amphal.autocast`'s arguments mean: every check, and the settings that they name.

Imported when the first region is made, so that ``import amphal`` loads neither registry nor plan.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _environment
from .._choice import Choice, choose, generation, on_clear
from .._torch import float16_regions, private
from ..contract import LOW_PRECISION, Hardware, registry
from ..errors import ArgumentError, ArgumentTypeError

__all__ = ["generation", "independent", "on_clear", "planned", "settled"]


def settled(
    device: Any, dtype: Any, enabled: Any, cache_enabled: Any
) -> tuple[str, torch.dtype, bool]:
    """Every check of :func:`autocast`'s arguments; the device type, the low dtype and on."""
    _check_flags(enabled, cache_enabled)
    return _settle(device, dtype, enabled)


def independent(device: object, dtype: object) -> bool:
    """Whether these arguments leave nothing to detect(): the answer to them lasts."""
    return isinstance(device, Choice) or (device is not None and dtype is not None)


def planned(device: Any, dtype: Any) -> Choice:
    """The plan of these arguments now; the same object until the answers are forgotten."""
    return choose.detect(device, precision="auto" if dtype is None else dtype)


def _check_flags(enabled: object, cache_enabled: object) -> None:
    if not isinstance(enabled, bool):
        raise ArgumentTypeError(
            f"enabled must be True or False, got {type(enabled).__name__} ({enabled!r})"
        )
    if cache_enabled is not None and not isinstance(cache_enabled, bool):
        raise ArgumentTypeError(
            "cache_enabled must be True, False or None (as it is on enter), "
            f"got {type(cache_enabled).__name__} ({cache_enabled!r})"
        )


def _settle(device: Any, dtype: Any, enabled: bool) -> tuple[str, torch.dtype, bool]:
    """The device type, the low dtype and whether autocast is on; every check is made here."""
    precision = None if dtype is None else choose.named_precision(dtype, what="dtype")
    if isinstance(device, Hardware):
        raise ArgumentTypeError(
            f"autocast() runs on a device that is here, and {device.name!r} is a description; "
            "pass a device, or ask amphal.detect() about the description"
        )
    if isinstance(device, Choice):
        device_type = device.hardware.device_type
        precision = device.dtype if precision is None else precision
        if enabled:
            choose.require_available(registry.get_backend(device_type), device_type)
            if device.support[precision].level == "absent":
                choose.detect(device.device, precision=precision)
    elif not enabled:
        # "Off" asks nothing of the device, so it may be absent; it must be a device all the same.
        device_type = _named_or_chosen(device)
    else:
        if device is not None:
            device = _torch_device_string(*choose.named_device(device, what="device_type"))
        plan = planned(device, precision)
        device_type = plan.hardware.device_type
        precision = plan.dtype
    if not private.autocast_available(device_type):
        raise ArgumentError(
            f"torch has no autocast for device type {device_type!r}; "
            "a region on it could change nothing"
        )
    on = enabled and precision in LOW_PRECISION
    if precision not in LOW_PRECISION:
        precision = torch.get_autocast_dtype(device_type)
    if on:
        from .._casting import (
            rules,  # at first use: it is needed once a region is made, and not before
        )

        rules.ensure_kernels(device_type, precision)
        if precision is torch.float16:  # made while Dynamo traces, it is entered in the graph
            float16_regions.add(device_type)
    return device_type, precision, on


def _torch_device_string(device_type: str, index: int | None) -> str:
    return device_type if index is None else f"{device_type}:{index}"


def _named_or_chosen(device: Any) -> str:
    """The device type that was named, here or in the environment, else the one to run on."""
    named = device if device is not None else _environment.read(_environment.DEVICE).lower()
    if named == "":
        return choose.detect(precision="fp32").hardware.device_type
    what = "device_type" if device is not None else _environment.DEVICE
    return registry.get_backend(choose.named_device(named, what)[0]).device_type


private.not_as_frames(__name__)
