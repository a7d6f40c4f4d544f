"""Clipping by norm, folded into unscaling: one read of the gradients.

The norm of the scaled gradients gives everything: the unscaled norm, the clipping and whether any
gradient is inf or NaN. A fused optimizer then divides by ``scale / clipping`` as it steps; for
others one multiplication unscales and clips at once.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from .._torch import private as _compat
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    NonFiniteGradientError,
    ScalerArgumentError,
    ScalerStateError,
)
from . import arguments as _scaler_rules
from . import gradients as _grads
from . import names as _grad_names

if TYPE_CHECKING:
    from .step import Stepper

__all__ = ["clip", "recheck", "total_norm"]


def clip(
    scaler: Stepper, what: Any, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """See :meth:`GradScaler.clip_grad_norm_`."""
    max_norm, norm_type = _arguments(max_norm, norm_type, error_if_nonfinite)
    if hasattr(what, "param_groups"):
        params = _grads.params_of(_scaler_rules.optimizer(what))
    else:
        what, params = None, _parameters(what)
    with torch.no_grad():
        if _several_ranks():
            _refuse_flattened(params)
            if error_if_nonfinite and scaler._process_group is not None:
                _refuse_together(scaler, what, params, norm_type)
                error_if_nonfinite = False
        if not scaler._enabled:
            return _clip_unscaled(scaler, params, max_norm, norm_type, error_if_nonfinite)
        scale, _ = scaler._check_scale_growth_tracker("clip_grad_norm_")
        if what is None:
            return _clip_params(scaler, params, scale, max_norm, norm_type, error_if_nonfinite)
        return _clip_optimizer(scaler, what, scale, max_norm, norm_type, error_if_nonfinite)


def _several_ranks() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _refuse_flattened(params: list[Tensor]) -> None:
    """FSDP1's shards are plain tensors: their norm would be another one on each rank."""
    if any(map(_compat.is_fsdp1_shard, params)):
        raise ArgumentError(
            "clip_grad_norm_() was given parameters of FullyShardedDataParallel, of which this "
            "rank has a shard as plain tensors, so it cannot tell the norm of the whole model: "
            "call scaler.unscale_(optimizer), then model.clip_grad_norm_(max_norm) of the "
            "FullyShardedDataParallel module"
        )


def _refuse_together(scaler: Stepper, what: Any, params: list[Tensor], norm_type: float) -> None:
    """``error_if_nonfinite`` for all ranks at once: the others would wait in the step for ever."""
    inverse = torch.ones(())
    if scaler._enabled:
        scale, _ = scaler._check_scale_growth_tracker("clip_grad_norm_")
        if what is None:
            scaled = _are_scaled(scaler, params)
        else:
            scaled = scaler._state_of(what)["stage"] is OptState.READY
        inverse = scale.reciprocal() if scaled else torch.ones_like(scale)
    total = unscaled_norm(params, inverse, norm_type)
    device = params[0].device if params else total.device  # without gradients total is the CPU's
    flags = scaler._all_reduce(_grads.nonfinite_flag(total).reshape(1).to(device))
    if flags.item():
        scaler._forget_untouched()
        _raise_nonfinite(scaler, norm_type, params)


def _arguments(max_norm: Any, norm_type: Any, error_if_nonfinite: Any) -> tuple[float, float]:
    if isinstance(max_norm, bool) or not isinstance(max_norm, numbers.Real):
        raise ArgumentTypeError(f"max_norm must be a number of 0 or more, got {max_norm!r}")
    try:
        limit, order = float(max_norm), float(norm_type)
    except OverflowError:
        raise ScalerArgumentError(
            "max_norm and norm_type must be numbers that a float holds, or inf; "
            "got an int beyond 1e308"
        ) from None
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"norm_type must be a number of more than 0, or inf, got {norm_type!r}"
        ) from None
    if not limit >= 0:
        raise ScalerArgumentError(f"max_norm must be 0 or more, got {max_norm!r}")
    if not order > 0:
        raise ScalerArgumentError(f"norm_type must be more than 0, or inf, got {norm_type!r}")
    if not isinstance(error_if_nonfinite, bool):
        raise ArgumentTypeError(
            f"error_if_nonfinite must be True or False, got {error_if_nonfinite!r}"
        )
    return limit, order


def _parameters(what: Any) -> list[Tensor]:
    if isinstance(what, Tensor):
        return [what]
    params = list(what) if isinstance(what, Iterable) else [what]
    wrong = [p for p in params if not isinstance(p, Tensor)]
    if wrong:
        raise ArgumentTypeError(
            "clip_grad_norm_() takes an optimizer, a parameter or an iterable of parameters "
            f"(model.parameters()), got {type(wrong[0]).__name__} among them"
        )
    return params


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
        squares, grads = _grads.squares_of_large(grads)
    kinds: dict[Any, list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault(_grads.kind_of(grad), []).append(grad)
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


def _coefficient(total: Tensor, max_norm: float) -> Tensor:
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def _multiply(groups: _grads.Groups, factor: Tensor) -> None:
    for (device, _, kind), grads in groups.items():
        if kind is Tensor:
            torch._foreach_mul_(grads, factor.to(device))
        else:
            for grad in grads:
                grad.mul_(factor.to(device))


def _refuse_nonfinite(
    scaler: Stepper, total: Tensor, norm_type: float, params: list[Tensor]
) -> None:
    if not bool(torch.isfinite(total)):
        _raise_nonfinite(scaler, norm_type, params)


def _raise_nonfinite(scaler: Stepper, norm_type: float, params: list[Tensor]) -> NoReturn:
    names = _grad_names.names_of_nonfinite([_Shell(params)], scaler._names())
    raise NonFiniteGradientError(
        f"the {norm_type:g}-norm of the gradients is not finite, so they cannot be clipped, and "
        f"error_if_nonfinite=True was given. Not finite: "
        f"{_grad_names.listed(names) or _grad_names.elsewhere('the norm alone')}. "
        "With error_if_nonfinite=False the scaler skips the step and backs off"
    )


class _Shell:
    """Parameters that belong to no optimizer, shaped like one for naming them."""

    def __init__(self, params: list[Tensor]) -> None:
        self.param_groups = [{"params": params}]


def _clip_unscaled(
    scaler: Stepper,
    params: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    total = total_norm(params, norm_type)
    if error_if_nonfinite:
        _refuse_nonfinite(scaler, total, norm_type, params)
    _multiply(_grads.gather(params), _coefficient(total, max_norm))
    return total


def _clip_optimizer(
    scaler: Stepper,
    optimizer: Any,
    scale: Tensor,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    from .step import is_fused, out_of_order

    state = scaler._state_of(optimizer)
    if state["stage"] is OptState.STEPPED or "divisor" in state:
        raise out_of_order("clip_grad_norm_", state)
    params = _grads.params_of(optimizer)
    groups = scaler._gather(optimizer, coalesce=True)
    folds = bool(groups) and _grads.is_plain(groups) and _can_fold(scaler, max_norm, norm_type)
    if state["stage"] is OptState.READY and not folds:
        if error_if_nonfinite:  # first, so that an error leaves the gradients as they were
            exact = unscaled_norm(params, scale.reciprocal(), norm_type)
            _refuse_nonfinite(scaler, exact, norm_type, params)
        scaler.unscale_(optimizer)
    if state["stage"] is OptState.UNSCALED:
        return _clip_unscaled(scaler, params, max_norm, norm_type, error_if_nonfinite)

    scaled = total_norm(params, norm_type)
    inverse = scale.reciprocal().to(scaled.device)
    total = (scaled * inverse).to(scaled.dtype)
    coefficient = _coefficient(total, max_norm)
    fused = is_fused(optimizer)
    divisor = (scale.to(scaled.device) / coefficient).to(torch.float32) if fused else coefficient
    if _overflowed(total, ask=error_if_nonfinite) or (fused and _overflowed(divisor, ask=False)):
        # The host knows it without waiting any more, so the exact check need not be put off.
        if error_if_nonfinite:
            exact = unscaled_norm(params, inverse, norm_type)
            _refuse_nonfinite(scaler, exact, norm_type, params)
        scaler.unscale_(optimizer)
        return _clip_unscaled(scaler, params, max_norm, norm_type, False)
    flag = _grads.nonfinite_flag(total)
    state["found_inf_per_device"] = {flag.device: flag}
    state["stage"] = OptState.UNSCALED
    if fused:
        state["divisor"] = divisor
        return total
    # After an overflow the gradients stay as they are, for the exact check before the step.
    factor = torch.where(flag != 0, torch.ones_like(inverse), inverse * coefficient)
    _multiply(groups, factor)
    state["recheck"] = (max_norm, norm_type)
    return total


def _can_fold(scaler: Stepper, max_norm: float, norm_type: float) -> bool:
    """Whether the norm of the scaled gradients tells what the norm of the unscaled would."""
    if norm_type not in (2.0, math.inf):
        return False  # other powers may overflow on the scaled gradients alone
    # Squares of gradients far below 2**-64 vanish, so the scale must not have fallen too low
    # for gradients as large as the limit.
    least = 2.0**-50 / min(max(max_norm, 2.0**-20), 1.0)
    if scaler._lower_bound() < least and len(scaler._history):
        scaler._read_history()
    return scaler._lower_bound() >= least


def _clip_params(
    scaler: Stepper,
    params: list[Tensor],
    scale: Tensor,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clip parameters that came without their optimizer: scaled or not, they stay as they are."""
    if not _are_scaled(scaler, params):
        return _clip_unscaled(scaler, params, max_norm, norm_type, error_if_nonfinite)
    inverse = scale.reciprocal()
    exact = not _can_fold(scaler, max_norm, norm_type)
    if not exact:
        scaled = total_norm(params, norm_type)
        total = (scaled * inverse.to(scaled.device)).to(scaled.dtype)
        # Ranks whose plain gradients differ would part here, and the exact norm is a collective.
        plain = _grads.is_plain(_grads.gather(params))
        exact = plain and _overflowed(total, ask=error_if_nonfinite)
    if exact:
        total = unscaled_norm(params, inverse, norm_type)
    if error_if_nonfinite:
        _refuse_nonfinite(scaler, total, norm_type, params)
    # NaN where the norm is not finite, and not 0: then the step is skipped, never taken with 0.
    coefficient = _coefficient(total, max_norm)
    coefficient = torch.where(total.isfinite(), coefficient, torch.full_like(total, math.nan))
    _multiply(_grads.gather(params), coefficient)
    return total


def _overflowed(total: Tensor, *, ask: bool) -> bool:
    """Whether this norm is not finite, where the host sees it or may ``ask`` the device."""
    seen = _grads.host_value(_grads.nonfinite_flag(total))
    return bool(seen) if seen is not None or not ask else not bool(total.isfinite())


def _are_scaled(scaler: Stepper, params: list[Tensor]) -> bool:
    ids = {id(param) for param in params if param.grad is not None}
    unscaled: set[int] = set()
    for state in scaler._per_optimizer_states.values():
        if state["stage"] is OptState.READY or "optimizer" not in state:
            continue
        own = ids & {id(param) for param in _grads.params_of(state["optimizer"])}
        if own and (state["stage"] is OptState.STEPPED or "divisor" in state):
            raise ScalerStateError(
                "clip_grad_norm_() was called for parameters whose optimizer was "
                + ("stepped" if state["stage"] is OptState.STEPPED else "clipped")
                + " already since the last update(): clip once, before step()"
            )
        unscaled |= own
    if unscaled and unscaled != ids:
        raise ScalerStateError(
            "clip_grad_norm_() was given parameters of which some are unscaled already and some "
            "are not: call scaler.unscale_(optimizer) for every optimizer concerned, or for none"
        )
    return not unscaled


def recheck(scaler: Stepper, states: list[dict[str, Any]]) -> Tensor | None:
    """After a norm that was not finite: unscale and clip exactly. The flag of all these optimizers.

    A 2-norm can exceed float32 where no single gradient does. Rare, so it may wait for the device.
    """
    assert scaler._scale is not None
    inverse, again, flags = scaler._scale.reciprocal(), [], []
    for state in states:
        own = state.get("own", state["found_inf_per_device"])
        if "recheck" in state and any(flag.item() for flag in own.values()):
            own = scaler._unscale_grads_(state["optimizer"], inverse, inverse, False)
            again.append((_grads.params_of(state["optimizer"]), *state["recheck"]))
        flags += own.values()
    flag = _grads.any_flag(flags, scaler._scale.device)
    if flag is not None and not flag.item():
        for params, max_norm, norm_type in again:
            _clip_unscaled(scaler, params, max_norm, norm_type, False)
    return flag
