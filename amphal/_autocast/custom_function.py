"""``custom_fwd`` and ``custom_bwd``: autograd functions that follow the device of their inputs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch.autograd.function import FunctionCtx

from .._torch import cast, private
from ..contract import PrecisionLike, spelling
from ..errors import ArgumentError, ArgumentTypeError, AutocastStateError
from .region import Region

__all__ = ["custom_bwd", "custom_fwd"]

_F = TypeVar("_F", bound=Callable[..., Any])

_is_enabled = torch.is_autocast_enabled
_get_dtype = torch.get_autocast_dtype
_is_compiling = torch.compiler.is_compiling


def _device_types(values: Any, found: dict[str, None]) -> dict[str, None]:
    """The device types of all tensors in nested arguments, in order of appearance."""
    if isinstance(values, torch.Tensor):
        found[values.device.type] = None
    elif isinstance(values, dict):
        for value in values.values():
            _device_types(value, found)
    elif isinstance(values, (list, tuple)):
        for value in values:
            _device_types(value, found)
    return found


# What such an object is made of is its class's affair (its constructor may want anything), so it is
# copied with all its attributes, and only what has changed is set.


# What a decorated forward leaves on ctx: (device type, whether autocast was on, its dtype) each.
_STATE = "_amphal_autocast"
_State = tuple[tuple[str, bool, torch.dtype], ...]


@overload
def custom_fwd(fwd: _F, /) -> _F: ...
@overload
def custom_fwd(
    *, device_type: str | torch.device | None = None, cast_inputs: PrecisionLike | None = None
) -> Callable[[_F], _F]: ...
def custom_fwd(
    fwd: Any = None,
    *,
    device_type: str | torch.device | None = None,
    cast_inputs: PrecisionLike | None = None,
) -> Any:
    """Decorate ``forward`` of a ``torch.autograd.Function``; the device is found from its inputs.

    Args:
        device_type: the device type to follow; None for those of the tensors that come in.
        cast_inputs: in an autocast region, cast floating-point inputs (float64 aside; in dicts,
            lists and tuples too) to this dtype and run ``forward`` with autocast off. Outside one
            it has no effect.

    Pair it with :func:`custom_bwd`, which runs ``backward`` in the state that ``forward`` had. A
    Function in the form that ``torch.func`` needs has a ``forward`` without ``ctx``: decorate its
    ``setup_context`` too, with plain ``@custom_fwd``, which keeps the state of ``forward``.
    """
    named = _autocast_device(device_type)
    target = _cast_dtype(cast_inputs)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    if not callable(fwd):
        raise ArgumentTypeError(f"custom_fwd decorates a function, got {type(fwd).__name__}")
    if getattr(fwd, "__name__", "") == "setup_context":
        if target is not None:
            raise ArgumentError(
                "cast_inputs belongs to forward; decorate setup_context with plain @custom_fwd"
            )
        return _keeping_state(fwd, named)
    owner = _class_of(fwd)

    @functools.wraps(fwd)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # A Function with setup_context has a forward without ctx, and setup_context comes next.
        has_ctx = bool(args) and isinstance(args[0], FunctionCtx)
        inputs = args[1:] if has_ctx else args
        state = _state_of(named, (inputs, kwargs))
        on = tuple(t for t, enabled, _ in state if enabled)
        if target is not None and on:
            state = tuple((t, False, dtype) for t, _, dtype in state)
        if has_ctx:
            setattr(args[0], _STATE, state)
            _leave_torchs_marks(args[0], state)
        if target is None or not on:
            result = fwd(*args, **kwargs)
        else:
            args, kwargs = cast(args, on, target), cast(kwargs, on, target)
            off = tuple((t, False, _get_dtype(t)) for t in on)
            result = _run_under(off, fwd, args, kwargs)
        if not has_ctx and not _is_compiling():
            _thread.last = owner, state  # last: forward may have called other functions
        return result

    return forward


class _Thread(threading.local):
    last: tuple[Any, _State] | None = None
    """The class whose forward without ctx has just run in this thread, and its state."""


_thread = _Thread()


def _class_of(func: Any) -> tuple[Any, str]:
    """What a function has in common with the others that were written in the same class."""
    name = getattr(func, "__qualname__", "").rpartition(".")[0]
    return getattr(func, "__module__", None), name


def _state_of(named: str | None, values: Any) -> _State:
    types = {named: None} if named else _device_types(values, {})
    available = [t for t in types if named or private.autocast_available(t)]
    return tuple((t, _is_enabled(t), _get_dtype(t)) for t in available)


def _keeping_state(setup: Any, named: str | None) -> Any:
    """``setup_context``, leaving on ctx the state of the forward that has just run."""
    owner = _class_of(setup)

    @functools.wraps(setup)
    def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        last = None if _is_compiling() else _thread.last
        # torch.func calls it once for each transform, all after the one forward.
        state = last[1] if last is not None and last[0] == owner else _state_of(named, inputs)
        setattr(ctx, _STATE, state)
        _leave_torchs_marks(ctx, state)
        return setup(ctx, inputs, output)

    return setup_context


def _autocast_device(device_type: Any) -> str | None:
    if device_type is None:
        return None
    name, _ = spelling.named_device(device_type, "device_type")
    if not private.autocast_available(name):
        raise ArgumentError(f"torch has no autocast for device type {name!r}")
    return name


def _cast_dtype(cast_inputs: Any) -> torch.dtype | None:
    # Any floating dtype, as torch allows: float64 is a sensible one to compute in.
    if cast_inputs is None or (
        isinstance(cast_inputs, torch.dtype) and cast_inputs.is_floating_point
    ):
        return cast_inputs
    return spelling.named_precision(cast_inputs, what="cast_inputs")


def _leave_torchs_marks(ctx: Any, state: tuple[tuple[str, bool, torch.dtype], ...]) -> None:
    """What ``torch.amp.custom_bwd`` reads, should it decorate the backward."""
    _, enabled, dtype = next((s for s in state if s[1]), state[0] if state else ("", False, None))
    ctx._fwd_used_autocast = enabled
    ctx._dtype = dtype


def _run_under(state: tuple[tuple[str, bool, Any], ...], func: Any, args: Any, kwargs: Any) -> Any:
    """``func(*args, **kwargs)`` in this autocast state, device by device."""
    if not state:
        return func(*args, **kwargs)
    device, enabled, dtype = state[0]
    if _is_compiling():
        region: torch.autocast = torch.autocast(device, dtype=dtype, enabled=enabled)
    else:
        region = Region(device, dtype, enabled, None)
    with region:
        return _run_under(state[1:], func, args, kwargs)


@overload
def custom_bwd(bwd: _F, /) -> _F: ...
@overload
def custom_bwd(*, device_type: str | torch.device | None = None) -> Callable[[_F], _F]: ...
def custom_bwd(bwd: Any = None, *, device_type: str | torch.device | None = None) -> Any:
    """Decorate ``backward`` of a ``torch.autograd.Function``: it runs in ``forward``'s state.

    Args:
        device_type: accepted for torch's sake and not needed with :func:`custom_fwd`. It names the
            device where ``forward`` was decorated by ``torch.amp.custom_fwd``.
    """
    named = _autocast_device(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    if not callable(bwd):
        raise ArgumentTypeError(f"custom_bwd decorates a function, got {type(bwd).__name__}")

    @functools.wraps(bwd)
    def backward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(ctx, _STATE):
            state = getattr(ctx, _STATE)
        elif hasattr(ctx, "_fwd_used_autocast"):
            types = [named] if named else list(_device_types((args, kwargs), {}))
            state = tuple((t, ctx._fwd_used_autocast, ctx._dtype) for t in types[:1])
        else:
            raise AutocastStateError(
                "custom_bwd found no state of the forward pass on ctx; decorate forward with "
                "@amphal.custom_fwd and, in a Function whose forward has no ctx, setup_context "
                "with @amphal.custom_fwd too"
            )
        return _run_under(state, bwd, (ctx, *args), kwargs)

    return backward
