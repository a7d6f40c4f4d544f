"""What a user may write for a device and for a precision."""

from __future__ import annotations

import re

import torch

from ..errors import ArgumentError, ArgumentTypeError, UnsupportedPrecisionError, did_you_mean
from . import registry
from .records import LARGEST_INDEX, PRECISIONS, Hardware

__all__ = ["DeviceLike", "PrecisionLike", "named_device", "named_precision", "short_name"]

DeviceLike = str | torch.device | Hardware
PrecisionLike = str | torch.dtype

_DEVICE_STRING = re.compile(r"([a-z][a-z0-9_]*)(?::([0-9]+))?\Z")
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def short_name(dtype: torch.dtype) -> str:
    """``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    return _SHORT[dtype]


def named_device(
    device: object, what: str = "device", also: str = "an amphal.Plan"
) -> tuple[str, int | None]:
    """The device type and index of a string or a ``torch.device``, registered or not.

    Raises:
        ArgumentTypeError: neither of the two.
        ArgumentError: a string that is no device.
    """
    if isinstance(device, torch.device):
        return device.type, device.index
    if not isinstance(device, str):
        raise ArgumentTypeError(
            f"{what} must be a string such as 'cuda' or 'cuda:0', a torch.device, {also} "
            f"or None, got {type(device).__name__} ({device!r})"
        )
    match = _DEVICE_STRING.match(device)
    if match is None:
        known = registry.known_names()
        raise ArgumentError(
            f"{what} must look like 'cuda' or 'cuda:0', got {device!r}; "
            f"registered: {', '.join(known)}.{did_you_mean(device.lower(), known)}"
        )
    if match[2] is None:
        return match[1], None
    if len(match[2]) > 3 or int(match[2]) > LARGEST_INDEX:
        raise ArgumentError(
            f"{what} must have an index of 0 to {LARGEST_INDEX}, got {device[:40]!r}"
        )
    return match[1], int(match[2])


def named_precision(precision: object, what: str = "dtype") -> torch.dtype:
    """The dtype that a name or a torch dtype stands for.

    Raises:
        ArgumentTypeError: neither a string nor a dtype.
        UnsupportedPrecisionError: a string or dtype that is no precision of autocast.
    """
    auto = "" if what.endswith("dtype") or what == "cast_inputs" else "'auto', "
    dtypes = (
        "" if what.isupper() else " or one of those three torch dtypes"
    )  # no dtype in a variable
    if isinstance(precision, str):
        if precision.lower() in PRECISIONS:
            return PRECISIONS[precision.lower()]
    elif isinstance(precision, torch.dtype):
        if precision in _SHORT:
            return precision
    else:
        raise ArgumentTypeError(
            f"{what} must be {auto}'bf16', 'fp16', 'fp32'{dtypes}, "
            f"got {type(precision).__name__} ({precision!r})"
        )
    hint = did_you_mean(str(precision), PRECISIONS)
    raise UnsupportedPrecisionError(
        f"{what} must be {auto}'bf16', 'fp16', 'fp32'{dtypes}, got {precision!r}.{hint}"
    )
