"""Clipping by norm, folded into unscaling: one read of the gradients.

The norm of the scaled gradients gives everything: the unscaled norm, the clipping and whether any
gradient is inf or NaN. A fused optimizer then divides by ``scale / clipping`` as it steps; for
others one multiplication unscales and clips at once.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from .._torch import private
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    ScalerStateError,
)
from . import arguments, gradients
from .norms import (
    _clip_unscaled,
    _coefficient,
    _raise_nonfinite,
    _refuse_nonfinite,
    multiply_by,
    norm_and_coefficient,
    overflowed,
    total_norm,
    unscaled_norm,
)
from .optimizers import is_fused, out_of_order
from .step import Stepper


def clip(
    scaler: Stepper, what: Any, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """See :meth:`GradScaler.clip_grad_norm_`."""
    max_norm, norm_type = _arguments(max_norm, norm_type, error_if_nonfinite)
    if hasattr(what, "param_groups"):
        params = gradients.params_of(arguments.optimizer(what))
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
    if any(map(private.is_fsdp1_shard, params)):
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
            scaled = scaler._state_of(what).stage is OptState.READY
        inverse = scale.reciprocal() if scaled else torch.ones_like(scale)
    total = _exact_norm(params, inverse, norm_type)
    device = params[0].device if params else total.device  # without gradients total is the CPU's
    flags = scaler._all_reduce(gradients.nonfinite_flag(total).reshape(1).to(device))
    if flags.item():
        scaler._forget_untouched()
        _raise_nonfinite(scaler, norm_type, params)


def _arguments(max_norm: Any, norm_type: Any, error_if_nonfinite: Any) -> tuple[float, float]:
    if isinstance(max_norm, bool) or not isinstance(max_norm, numbers.Real):
        raise ArgumentTypeError(f"max_norm must be a number of 0 or more, got {max_norm!r}")
    try:
        limit, order = float(max_norm), float(norm_type)
    except OverflowError:
        raise ArgumentError(
            "max_norm and norm_type must be numbers that a float holds, or inf; "
            "got an int beyond 1e308"
        ) from None
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"norm_type must be a number of more than 0, or inf, got {norm_type!r}"
        ) from None
    if not limit >= 0:
        raise ArgumentError(f"max_norm must be 0 or more, got {max_norm!r}")
    if not order > 0:
        raise ArgumentError(f"norm_type must be more than 0, or inf, got {norm_type!r}")
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


def _clip_optimizer(
    scaler: Stepper,
    optimizer: Any,
    scale: Tensor,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    state = scaler._state_of(optimizer)
    if state.stage is OptState.STEPPED or state.divisor is not None:
        raise out_of_order("clip_grad_norm_", state)
    if state.stage is OptState.UNSCALED:
        scaler._unmixed(state)
        scaler._take_newcomers(optimizer, state)
    params = gradients.params_of(optimizer)
    groups = scaler._gather(optimizer, coalesce=True)
    folds = bool(groups) and gradients.is_plain(groups) and _can_fold(scaler, max_norm, norm_type)
    if folds and state.stage is OptState.READY and scaler._by_factor(optimizer) is not None:
        folds = False
    if state.stage is OptState.READY and not folds:
        if error_if_nonfinite:  # first, so that an error leaves the gradients as they were
            exact = _exact_norm(params, scale.reciprocal(), norm_type)
            _refuse_nonfinite(scaler, exact, norm_type, params)
        scaler.unscale_(optimizer)
    if state.stage is OptState.UNSCALED:
        total = _clip_unscaled(scaler, params, max_norm, norm_type, error_if_nonfinite)
        flag = gradients.nonfinite_flag(total)
        if groups and (not gradients.is_plain(groups) or gradients.host_value(flag) is None):
            # The host cannot see a norm that overflowed though every gradient is finite, so the
            # coefficient was 0: skip the step.
            seen = state.found_inf_per_device.get(flag.device)
            state.found_inf_per_device[flag.device] = (
                flag if seen is None else torch.maximum(seen, flag)
            )
        return total

    scaled = total_norm(params, norm_type)
    inverse = scale.reciprocal().to(scaled.device)
    total = (scaled * inverse).to(scaled.dtype)
    coefficient = _coefficient(total, max_norm)
    fused = is_fused(optimizer)
    divisor = (scale.to(scaled.device) / coefficient).to(torch.float32) if fused else coefficient
    if overflowed(total, ask=error_if_nonfinite) or (fused and overflowed(divisor, ask=False)):
        # The host knows it without waiting any more, so the exact check need not be put off.
        if error_if_nonfinite:
            exact = _exact_norm(params, inverse, norm_type)
            _refuse_nonfinite(scaler, exact, norm_type, params)
        scaler.unscale_(optimizer)
        return _clip_unscaled(scaler, params, max_norm, norm_type, False, ask=True)
    flag = gradients.nonfinite_flag(total)
    state.found_inf_per_device = {flag.device: flag}
    state.stage = OptState.UNSCALED
    state.params = params
    state.calls, state.noted = scaler._scale_calls, scaler._notes_all
    if fused:
        state.divisor = divisor
        return total
    # After an overflow the gradients stay as they are, for the exact check before the step.
    factor = torch.where(flag != 0, torch.ones_like(inverse), inverse * coefficient)
    gradients.multiply_(groups, factor)
    state.recheck = (max_norm, norm_type)
    if scaler._notes_all:
        scaler._note(optimizer, torch.where(flag != 0, scale.to(flag.device), 1.0))
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
    # Ranks whose plain gradients differ would part here, and the exact norm is a collective.
    plain = gradients.is_plain(gradients.gather(params))
    if not exact:
        scaled = total_norm(params, norm_type)
        total = (scaled * inverse.to(scaled.device)).to(scaled.dtype)
        exact = plain and overflowed(total, ask=error_if_nonfinite)
    if exact:
        total = unscaled_norm(params, inverse, norm_type)
        if plain and overflowed(total, ask=error_if_nonfinite):
            found = norm_and_coefficient(params, inverse, norm_type, max_norm)
            if found is not None:
                total, coefficient = found
                if error_if_nonfinite:
                    _refuse_nonfinite(scaler, total, norm_type, params)
                multiply_by(gradients.gather(params), coefficient)
                return total
    if error_if_nonfinite:
        _refuse_nonfinite(scaler, total, norm_type, params)
    if max_norm == math.inf:
        return total
    # NaN where the norm is not finite, and not 0: then the step is skipped, never taken with 0.
    nan = torch.full_like(total, math.nan)
    factor = torch.where(total.isfinite(), _coefficient(total, max_norm), nan)
    gradients.multiply_(gradients.gather(params), factor)
    return total


def _exact_norm(params: list[Tensor], inverse: Tensor, norm_type: float) -> Tensor:
    """The norm of the unscaled gradients, finite wherever it fits; waits for the device."""
    total = unscaled_norm(params, inverse, norm_type)
    if gradients.is_plain(gradients.gather(params)) and overflowed(total, ask=True):
        found = norm_and_coefficient(params, inverse, norm_type, math.inf)
        total = total if found is None else found[0]
    return total


def _are_scaled(scaler: Stepper, params: list[Tensor]) -> bool:
    ids = {id(param) for param in params if param.grad is not None}
    unscaled: set[int] = set()
    for state in scaler._per_optimizer_states.values():
        if state.stage is OptState.READY or state.optimizer is None:
            continue
        own = ids & {id(param) for param in gradients.params_of(state.optimizer)}
        if own and (state.stage is OptState.STEPPED or state.divisor is not None):
            raise ScalerStateError(
                "clip_grad_norm_() was called for parameters whose optimizer was "
                + ("stepped" if state.stage is OptState.STEPPED else "clipped")
                + " already since the last update(): clip once, before step()"
            )
        unscaled |= own
    if unscaled and unscaled != ids:
        raise ScalerStateError(
            "clip_grad_norm_() was given parameters of which some are unscaled already and some "
            "are not: call scaler.unscale_(optimizer) for every optimizer concerned, or for none"
        )
    return not unscaled


private.not_as_frames(__name__)
