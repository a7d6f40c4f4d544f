"""Cast kernels: what each policy does to a call of an op.

A kernel does in Python what torch's own autocast kernels do in C++: cast the eligible inputs
(floating-point tensors of this device type, float64 aside), then call the op again with autocast
out of the way. Casts are ordinary differentiable ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .._torch import private
from ..contract import op_names
from ..errors import OpPolicyError

__all__ = ["PASS_BY", "Action", "action"]

PASS_BY = "pass_by"
"""Beside the policies of OpLists: what autocast does with an op that it does not list."""

Action = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""A policy applied to one call: ``(keyset, args, kwargs)`` to the op's result."""

_Tensor = torch.Tensor
_FLOAT, _DOUBLE = torch.float32, torch.float64
_get_dtype = torch.get_autocast_dtype
_set_dtype = torch.set_autocast_dtype
_set_enabled = torch.set_autocast_enabled
_under_transform = private.under_transform


def action(op: str, policy: str, device: str) -> Action:
    """What ``policy`` does to a call of ``op`` on tensors of ``device``."""
    # An op outside aten can be taken out of its library and be defined anew.
    return _made(op, policy, device) if "::" not in op else _MAKERS[policy](op, device)


@functools.lru_cache(maxsize=4096)
def _made(op: str, policy: str, device: str) -> Action:
    return _MAKERS[policy](op, device)


# Tensor.float() takes half the time of Tensor.to(torch.float32).
_METHODS: dict[torch.dtype, Callable[[torch.Tensor], torch.Tensor]] = {
    torch.float32: torch.Tensor.float,
    torch.bfloat16: torch.Tensor.bfloat16,
    torch.float16: torch.Tensor.half,
}
_FLOATING = frozenset(d for d in private.all_dtypes() if d.is_floating_point) - {_DOUBLE}


def _casts(device: str) -> Callable[[Any, torch.dtype], Any]:
    """``(value, dtype)`` to the value with its eligible tensors cast, in lists too."""
    is_here = private.is_on(device)
    methods, floating = _METHODS, _FLOATING

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, _Tensor):
            found = value.dtype
            if found is dtype or found not in floating or not is_here(value):
                return value
            return methods[dtype](value)
        if isinstance(value, (list, tuple)):
            return [cast(v, dtype) for v in value]
        return value

    return cast


def _eligible(value: Any, device: str) -> Iterator[torch.Tensor]:
    if isinstance(value, _Tensor):
        if value.dtype in _FLOATING and value.device.type == device:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _eligible(item, device)


def _casting(op: str, device: str, choose: Callable[[Iterable[Any]], torch.dtype]) -> Action:
    """Cast every eligible input to the dtype that ``choose`` names, and call on."""
    if op_names.statistics_of(op):
        return _casting_beside_statistics(op, device, choose)
    overload = op_names.op_overload(op)
    call = private.caller(overload)
    cast = _casts(device)
    composite = private.is_composite(overload)

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = choose((*args, *kwargs.values()) if kwargs else args)
        # The same bit of thread state that torch's kernels set, for the same reason: neither the
        # casts nor what the op is made of are autocast again.
        _set_enabled(device, False)
        try:
            if kwargs:
                kwargs = {name: cast(v, dtype) for name, v in kwargs.items()}
            args = tuple(cast(v, dtype) for v in args)
            if composite and _under_transform():
                return _call_in(dtype, device, call, args, kwargs)
            return call(*args, **kwargs)
        finally:
            _set_enabled(device, True)

    return run


def _call_in(
    dtype: torch.dtype,
    device: str,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a composite op in a ``torch.func`` transform, its parts in ``dtype``.

    A transform runs the parts in the dispatch state that it had found before the kernel, with
    autocast on again. Its dtype is no part of that state, so with this one there is no cast.
    """
    before = _get_dtype(device)
    _set_dtype(device, dtype)
    try:
        return call(*args, **kwargs)
    finally:
        _set_dtype(device, before)


def _casting_beside_statistics(
    op: str, device: str, choose: Callable[[Iterable[Any]], torch.dtype]
) -> Action:
    """As ``_casting``, for an op that writes into running statistics without declaring it.

    A cast would send the update into a copy. To a low dtype only the first input is cast, as
    autocast leaves a batch norm: statistics in low precision would lose small updates, and the
    weights must have their dtype. To float32 all is cast, and the statistics are written back.
    """
    overload = op_names.op_overload(op)
    call = private.caller(overload)
    cast = _casts(device)
    names = [a.name for a in overload._schema.arguments]
    defaults = {
        a.name: a.default_value for a in overload._schema.arguments if a.has_default_value()
    }
    statistics = op_names.statistics_of(op)
    flag = next((n for n in names if n in op_names.WRITES_IF), None)

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = choose((*args, *kwargs.values()))
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        found = {n: given[n] for n in statistics if given.get(n) is not None}
        low = dtype is not _FLOAT and any(s.dtype is not dtype for s in found.values())
        _set_enabled(device, False)
        try:
            inputs = {n: v if low and n != names[0] else cast(v, dtype) for n, v in given.items()}
            result = call(*[inputs[n] for n in names])
            if flag is None or given[flag]:
                with torch.no_grad():
                    for name, statistic in found.items():
                        if inputs[name] is not statistic:
                            statistic.copy_(inputs[name])
            return result
        finally:
            _set_enabled(device, True)

    return run


def _lower_precision(op: str, device: str) -> Action:
    return _casting(op, device, lambda values: _get_dtype(device))


def _fp32(op: str, device: str) -> Action:
    return _casting(op, device, lambda values: _FLOAT)


def _promote(op: str, device: str) -> Action:
    def widest(values: Iterable[Any]) -> torch.dtype:
        low = _get_dtype(device)
        same = all(t.dtype is low for value in values for t in _eligible(value, device))
        return low if same else _FLOAT

    return _casting(op, device, widest)


def _as_is(op: str, device: str) -> Action:
    overload = op_names.op_overload(op)
    call = private.caller(overload)
    composite = private.is_composite(overload)

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _set_enabled(device, False)
        try:
            if composite and _under_transform():
                values = (*args, *kwargs.values())
                dtypes = {t.dtype for value in values for t in _eligible(value, device)}
                if len(dtypes) == 1:
                    return _call_in(dtypes.pop(), device, call, args, kwargs)
            return call(*args, **kwargs)
        finally:
            _set_enabled(device, True)

    return run


# Of the ops that take numbers, those that are made of another one.
_OTHER_NAMES = {"divide": "div", "multiply": "mul", "subtract": "sub", "true_divide": "div"}


def _pass_by(op: str, device: str) -> Action:
    # Past autocast, not out of it: what the op is made of is still cast.
    overload = op_names.op_overload(op)
    redispatch = private.redispatcher(overload)
    behind = private.after_key(private.autocast_key(device))
    if not private.takes_numbers(overload):
        return lambda keyset, args, kwargs: redispatch(keyset & behind, *args, **kwargs)
    # ``x * 2.0`` is a call of mul.Tensor, and the number comes here as a Python float, which
    # redispatching refuses and calling takes.
    name, _, rest = op.partition(".")
    made_of = _OTHER_NAMES.get(name)
    call = private.caller(op_names.op_overload(f"{made_of}.{rest}") if made_of else overload)

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if all(isinstance(value, _Tensor) for value in args[:2]):
            return redispatch(keyset & behind, *args, **kwargs)
        if made_of:  # what it is made of is cast
            return call(*args, **kwargs)
        _set_enabled(device, False)
        try:
            return call(*args, **kwargs)
        finally:
            _set_enabled(device, True)

    return run


def _set_opt_dtype(op: str, device: str) -> Action:
    overload = op_names.op_overload(op)
    call = private.caller(overload)
    position = [a.name for a in overload._schema.arguments].index("dtype")

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _set_enabled(device, False)
        try:
            # The dispatcher leaves out arguments that have their default value.
            given = len(args) > position or kwargs.get("dtype") is not None
            if not given and any(True for _ in _eligible(args[0], device)):
                kwargs = {**kwargs, "dtype": _FLOAT}
            return call(*args, **kwargs)
        finally:
            _set_enabled(device, True)

    return run


def _append_dtype(op: str, device: str) -> Action:
    plain = op_names.op_overload(op)
    with_dtype = op_names.op_overload(str(op_names.dtype_overload(op)))
    defaults = {a.name: a.default_value for a in plain._schema.arguments if a.has_default_value()}
    names = [a.name for a in plain._schema.arguments]

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        first = args[0]
        dtype = _FLOAT if any(True for _ in _eligible(first, device)) else first.dtype
        _set_enabled(device, False)
        try:
            return with_dtype(**given, dtype=dtype)
        finally:
            _set_enabled(device, True)

    return run


def _banned(op: str, device: str) -> Action:
    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise OpPolicyError(
            f"{op} is banned by this region's casting policy: it is unsafe to autocast. Call it "
            f"on float32 inputs in a region with enabled=False, or give it another policy"
        )

    return run


_MAKERS: dict[str, Callable[[str, str], Action]] = {
    "lower_precision": _lower_precision,
    "fp32": _fp32,
    "fp32_set_opt_dtype": _set_opt_dtype,
    "fp32_append_dtype": _append_dtype,
    "promote": _promote,
    "as_is": _as_is,
    PASS_BY: _pass_by,
    "banned": _banned,
}


private.not_as_frames(__name__)
