"""Norms of gradients, scaled or not, and clipping by them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._torch import private
from ..errors import NonFiniteGradientError
from . import gradients
from . import names as grad_names
from .scale import Scale


def total_norm(params: Iterable[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients as they are; a DTensor's in full."""
    grads = []
    for param in params:
        grad = param.grad
        if grad is not None and grad.is_sparse:
            grad = param.grad = grad.coalesce()  # duplicate indices must be summed first
            grad = grad._values()
        if grad is not None and grad.numel():  # an empty tensor has no infinity norm
            grads.append(grad)
    squares: list[Tensor] = []
    if norm_type == 2.0:
        squares, grads = gradients.squares_of_large(grads)
    kinds: dict[Any, list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault(gradients.kind_of(grad), []).append(grad)
    norms = [square.sqrt() for square in squares]
    for alike in kinds.values() if kinds or squares else [[]]:
        norms.append(_norm_of(alike, norm_type))
    return _combined(norms, norm_type)


def _norm_of(alike: list[Tensor], norm_type: float) -> Tensor:
    """The norm of gradients of one kind; of DTensors in full, which is a collective."""
    if norm_type == math.inf and alike and hasattr(alike[0], "to_local"):
        return _largest(alike)
    norm: Tensor = torch.nn.utils.get_total_norm(alike, norm_type)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _largest(grads: list[Any]) -> Tensor:
    """The infinity norm of DTensors of one kind.

    A rank's part of one may be empty, for which torch's has no answer, and the others then wait.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = grads[0].device_mesh
    if any(placement.is_partial() for placement in grads[0].placements):
        grads = [grad.redistribute(placements=[Replicate()] * mesh.ndim) for grad in grads]
    parts = [part for grad in grads if (part := grad.to_local()).numel()]
    here = (
        torch.stack([torch.linalg.vector_norm(part, math.inf) for part in parts]).amax()
        if parts
        else torch.zeros((), dtype=grads[0].dtype, device=grads[0].to_local().device)
    )
    whole: Tensor = DTensor.from_local(here, mesh, [Partial("max")] * mesh.ndim).full_tensor()
    return whole


def _combined(norms: list[Tensor], norm_type: float) -> Tensor:
    if len(norms) == 1:
        return norms[0]
    whole: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type
    )
    return whole


def unscaled_norm(params: Iterable[Tensor], inverse: Tensor, norm_type: float) -> Tensor:
    """What :func:`total_norm` would give after unscaling, with the gradients as they are.

    For where the norm of the scaled gradients may not fit. Copies one gradient at a time.
    """
    norms = []
    for param in params:
        grad = param.grad
        if grad is not None and grad.is_sparse:
            grad = param.grad = grad.coalesce()
            grad = grad._values()
        if grad is not None and grad.numel():
            copy = grad * inverse.to(grad.device)
            norms.append(_norm_of([copy], norm_type))
    return _combined(norms, norm_type) if norms else total_norm((), norm_type)


def overflowed(total: Tensor, *, ask: bool) -> bool:
    """Whether this norm is not finite, where the host sees it or may ``ask`` the device."""
    if torch.compiler.is_compiling():
        return False
    seen = gradients.host_value(gradients.nonfinite_flag(total))
    return bool(seen) if seen is not None or not ask else not bool(total.isfinite())


def norm_and_coefficient(
    params: list[Tensor], inverse: Tensor | None, norm_type: float, max_norm: float
) -> tuple[Tensor, float] | None:
    """The norm and the coefficient where the plain sum of powers overflowed; waits for the device.

    Divides by the largest magnitude first, so only the result must fit: the norm is inf where it
    exceeds the dtype, and the coefficient is right even then. None: a gradient is not finite.
    """
    unscaled = []
    for param in params:
        grad = param.grad
        if grad is not None and grad.numel():
            grad = grad.coalesce()._values() if grad.is_sparse else grad
            unscaled.append(grad if inverse is None else grad * inverse.to(grad.device))
    largest = max((abs(grad).max().item() for grad in unscaled if grad.numel()), default=0.0)
    if not 0.0 < largest < math.inf or any(bool(gradients.nonfinite_flag(g)) for g in unscaled):
        return None
    mantissa, exponent = math.frexp(largest)
    # Two exact factors: the inverse of the largest numbers is subnormal, which a device may flush.
    halves = math.ldexp(1.0, -(exponent // 2)), math.ldexp(1.0, -(exponent - exponent // 2))
    parts = [_norm_of([g * halves[0] * halves[1] / mantissa], norm_type) for g in unscaled]
    relative = _combined(parts, norm_type)  # 1 or more
    coefficient = min(1.0, max_norm / largest / relative.item())
    return relative * mantissa / halves[0] / halves[1], coefficient


def multiply_by(groups: gradients.Groups, coefficient: float) -> None:
    """Multiply by what may be less than float32's least normal number, in two steps."""
    if coefficient == 1.0:
        return
    mantissa, exponent = math.frexp(coefficient)
    half = exponent // 2
    for key, grads in groups.items():
        dtype = torch.promote_types(key[1], torch.float32)
        for factor in (math.ldexp(1.0, half), math.ldexp(mantissa, exponent - half)):
            gradients.multiply_({key: grads}, torch.full((), factor, dtype=dtype, device=key[0]))


def _coefficient(total: Tensor, max_norm: float) -> Tensor:
    if max_norm == math.inf:  # only measures; inf / inf is NaN where the norm alone overflows
        return torch.ones_like(total)
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def _refuse_nonfinite(scaler: Scale, total: Tensor, norm_type: float, params: list[Tensor]) -> None:
    if not bool(torch.isfinite(total)):
        _raise_nonfinite(scaler, norm_type, params)


def _raise_nonfinite(scaler: Scale, norm_type: float, params: list[Tensor]) -> NoReturn:
    names = grad_names.names_of_nonfinite([Params(params)], scaler._names())
    raise NonFiniteGradientError(
        f"the {norm_type:g}-norm of the gradients is not finite, so they cannot be clipped, and "
        f"error_if_nonfinite=True was given. Not finite: "
        f"{grad_names.listed(names) or grad_names.elsewhere('the norm alone')}. "
        "With error_if_nonfinite=False the scaler skips the step and backs off"
    )


class Params:
    """Parameters in the form of an optimizer, which names and gathers them."""

    def __init__(self, params: list[Tensor]) -> None:
        self.param_groups = [{"params": params}]


def _clip_unscaled(
    scaler: Scale,
    params: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    *,
    ask: bool = False,
) -> Tensor:
    """Clip gradients that carry no scale. ``ask``: the host may wait for the device."""
    total = total_norm(params, norm_type)
    groups = gradients.gather(params)
    # Ranks whose plain gradients differ would part here, and the norm of DTensors is a collective.
    if gradients.is_plain(groups) and overflowed(total, ask=ask or error_if_nonfinite):
        exact = norm_and_coefficient(params, None, norm_type, max_norm)
        if exact is not None:
            total = exact[0]
            if error_if_nonfinite:
                _refuse_nonfinite(scaler, total, norm_type, params)
            multiply_by(groups, exact[1])
            return total
    if error_if_nonfinite:
        _refuse_nonfinite(scaler, total, norm_type, params)
    gradients.multiply_(groups, _coefficient(total, max_norm))
    return total


private.not_as_frames(__name__)
