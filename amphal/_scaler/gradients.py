"""Gradients as a scaler sees them: gathered, named, checked and unscaled, with no host sync.

A *flag* is a float32 scalar tensor on a gradient's device: 0.0, or 1.0 where something is not
finite. float64 is never used, except on gradients that are float64 themselves.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._torch import private

__all__ = [
    "Groups",
    "any_flag",
    "check",
    "distinct",
    "float32",
    "gather",
    "host_value",
    "is_plain",
    "multiply_",
    "nonfinite_flag",
    "params_of",
    "probe",
    "squares_of_large",
    "unscale_",
    "update_scale_",
]

_LARGE = 1 << 15
"""From how many elements on a dot product is cheaper than the kernel, its overhead included."""

Groups = dict[tuple[torch.device, torch.dtype, Any], list[Tensor]]


def float32(value: float) -> float:
    """``value`` rounded to float32; inf beyond its range."""
    return ctypes.c_float(value).value


def host_value(scalar: Tensor) -> float | None:
    """The value of a float32 scalar that lies in the host's own memory; None for any other.

    There, knowing it takes no transfer and no waiting, so no op is needed either.
    """
    if type(scalar) is Tensor and scalar.is_cpu:
        return ctypes.c_float.from_address(scalar.data_ptr()).value
    return None


def gather(params: list[Tensor], *, coalesce: bool = False) -> Groups:
    """The gradients by device, dtype and kind: strided real tensors that share memory.

    A sparse gradient gives its values, coalesced first if ``coalesce``; a complex one its parts.
    """
    grads = [grad for param in params if (grad := param.grad) is not None]
    if not grads:
        return {}
    device, dtype = grads[0].device, grads[0].dtype
    if not dtype.is_complex and all(
        type(g) is Tensor and g.dtype is dtype and g.layout is torch.strided and g.device == device
        for g in grads
    ):
        return {(device, dtype, Tensor): grads}  # the common case, and several times cheaper
    groups: Groups = {}
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            if coalesce and grad.is_sparse and not grad.is_coalesced():
                grad = param.grad = grad.coalesce()
            grad = grad._values() if grad.is_sparse else grad.values()
        groups.setdefault((grad.device, grad.dtype, kind_of(grad)), []).append(grad)
    for key in [key for key in groups if key[1].is_complex]:
        # A gradient may be conjugated lazily; undoing that shares its memory, and a real factor
        # and a check treat both alike.
        alike = [grad.conj() if grad.is_conj() else grad for grad in groups.pop(key)]
        real = [torch.view_as_real(grad) for grad in alike]
        groups.setdefault((key[0], real[0].dtype, key[2]), []).extend(real)
    return groups


def kind_of(grad: Tensor) -> Any:
    """``Tensor`` for a plain one; for a DTensor also how it lies on its mesh.

    torch's kernels over several DTensors ask the first one how all of them lie.
    """
    if type(grad) is Tensor or not hasattr(grad, "placements"):
        return type(grad)
    return type(grad), grad.device_mesh, grad.placements  # type: ignore[attr-defined]


def params_of(optimizer: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def distinct(groups: Groups) -> Groups:
    """The groups with each dense real gradient once; the same object where none is there twice."""
    if all(len(set(map(id, grads))) == len(grads) for grads in groups.values()):
        return groups
    return {key: list({id(g): g for g in grads}.values()) for key, grads in groups.items()}


def is_plain(groups: Groups) -> bool:
    """No tensor subclass such as DTensor among them."""
    return all(kind is Tensor for _, _, kind in groups)


def nonfinite_flag(values: Tensor) -> Tensor:
    """1.0 if any of ``values`` is inf or NaN, else 0.0; on their device."""
    # x - x is 0 for a finite x and NaN otherwise, and a sum keeps a NaN: fewer ops than isfinite.
    return (values - values).sum().ne(0).to(torch.float32)


def any_flag(flags: Iterable[Tensor], device: torch.device) -> Tensor | None:
    """The flags of several devices as one on ``device``; None if there are none."""
    here: list[Tensor] = []
    seen: list[Tensor] = []
    for flag in flags:  # a plain loop, which torch.compile can trace
        if not any(flag is other for other in seen):
            seen.append(flag)
            here.append(flag.to(device, non_blocking=True))
    if not here:
        return None
    if len(here) == 1:
        return here[0]
    return torch.stack([flag.reshape(()) for flag in here]).amax()


def _extremes(grads: list[Tensor]) -> Tensor | None:
    """Per tensor the largest magnitude, or both extremes, in one read of the gradients."""
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return None
    if grads[0].device.type in private.foreach_devices():
        return torch.stack(torch._foreach_norm(grads, float("inf")))
    # Where foreach ops are loops, an inf-norm is several times slower than a minimum and maximum.
    return torch.stack([extreme for grad in grads for extreme in torch.aminmax(grad)])


class _On:
    """A scalar tensor on whichever device is asked for, copied once each."""

    def __init__(self, value: Tensor) -> None:
        self._copies = {value.device: value}
        self._value = value

    def __call__(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            self._copies[device] = self._value.to(device, non_blocking=True)
        return self._copies[device]


def probe(groups: Groups, scale: Tensor) -> dict[torch.device, Tensor]:
    """A flag per device: would any plain gradient divided by ``scale`` not be finite? One read."""
    on = _On(scale)
    flags: dict[torch.device, Tensor] = {}
    for (device, dtype, _), grads in groups.items():
        extremes = _extremes(grads)
        if extremes is None:
            flag = torch.zeros((), dtype=torch.float32, device=device)
        else:
            flag = nonfinite_flag((extremes / on(device)).to(dtype))
        flags[device] = torch.maximum(flags[device], flag) if device in flags else flag
    return flags


def check(groups: Groups) -> dict[torch.device, Tensor]:
    """A flag per device: is any gradient not finite? Leaves them as they are."""
    flags: dict[torch.device, Tensor] = {}
    for (device, _, kind), grads in groups.items():
        if device not in flags:
            flags[device] = torch.zeros((), dtype=torch.float32, device=device)
        if kind is Tensor:
            grads = _not_surely_finite(grads)
        if grads:
            one = torch.ones((), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flags[device], one)
    return flags


def _not_surely_finite(grads: list[Tensor]) -> list[Tensor]:
    """The float32 gradients that need the kernel.

    It writes what it reads, also when it multiplies by 1. A sum of squares reads only, and if that
    is finite so is each element.
    """
    squares, rest = squares_of_large(grads)
    total = host_value(torch.stack(squares).sum()) if squares else None
    return rest if total is not None and math.isfinite(total) else grads


def squares_of_large(grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The sums of squares of large float32 gradients in the host's memory, and the other gradients.

    A dot product is three times as fast there as torch's norm or its check.
    """
    squares, rest = [], []
    for grad in grads:
        if (
            grad.is_cpu
            and grad.numel() >= _LARGE
            and type(grad) is Tensor
            and grad.dtype is torch.float32
            and grad.is_contiguous()
        ):
            flat = grad.view(-1)
            squares.append(torch.dot(flat, flat))
        else:
            rest.append(grad)
    return squares, rest


def unscale_(
    groups: Groups, inverse: Tensor, *, native: bool, may_overflow: bool
) -> dict[torch.device, Tensor]:
    """Multiply every gradient by ``inverse`` in place; a flag per device.

    Args:
        inverse: the inverse of the scale, a float32 scalar.
        native: use the ``_amp_*`` kernel, which checks a value before it multiplies it.
        may_overflow: ``inverse`` may exceed 1, so the products are checked too.
    """
    on = _On(inverse)
    flags: dict[torch.device, Tensor] = {}
    for (device, dtype, kind), grads in groups.items():
        if device not in flags:
            flags[device] = torch.zeros((), dtype=torch.float32, device=device)
        if kind is not Tensor or (native and not may_overflow):
            # For a DTensor this kernel also makes the ranks of its mesh agree.
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flags[device], on(device))
            if may_overflow:
                one = torch.ones((), dtype=torch.float32, device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(grads, flags[device], one)
            continue
        extremes = _extremes(grads)
        if extremes is not None:
            flag = nonfinite_flag((extremes * on(device)).to(dtype))
            flags[device] = torch.maximum(flags[device], flag)
            torch._foreach_mul_(grads, on(device))
    return flags


def multiply_(groups: Groups, factor: Tensor) -> None:
    """Multiply every gradient by ``factor``, a scalar tensor, in place."""
    for (device, _, kind), grads in groups.items():
        if kind is Tensor:
            torch._foreach_mul_(grads, factor.to(device))
        else:
            for grad in grads:
                grad.mul_(factor.to(device))


def _times(scale: Tensor, factor: float) -> Tensor:
    """``scale * factor`` as if computed in double and rounded once, in float32 operations only."""
    high = float32(factor)
    low = float32(factor - high)
    product = scale * high
    if low == 0.0:
        return product
    # Dekker's exact product: split both factors into halves whose products are exact.
    scale_high = (scale.view(torch.int32) & -4096).view(torch.float32)
    scale_low = scale - scale_high
    bits = ctypes.c_int32.from_buffer(ctypes.c_float(high)).value & -4096
    high_high = ctypes.c_float.from_buffer(ctypes.c_int32(bits)).value
    high_low = high - high_high
    error = (scale_high * high_high - product) + scale_high * high_low + scale_low * high_high
    return product + (error + scale_low * high_low + scale * low)


def update_scale_(
    scale: Tensor, tracker: Tensor, flag: Tensor, growth: float, backoff: float, interval: int
) -> None:
    """What ``torch._amp_update_scale_`` does, in plain torch ops, for devices without it."""
    bad = flag != 0
    successful = tracker + 1
    grow = (successful == interval) & ~bad
    grown = _times(scale, growth)
    grown = torch.where(grown.isfinite(), grown, scale)
    scale.copy_(torch.where(bad, _times(scale, backoff), torch.where(grow, grown, scale)))
    tracker.copy_(successful * ~(bad | grow))


private.not_as_frames(__name__)
