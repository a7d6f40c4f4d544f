"""Find an op's casting policy by watching autocast, on fake tensors: no hardware is needed.

torch's autocast kernels run in C++ and know the device of a fake tensor. In inference mode nothing
lies between them and the Python dispatch key, not even for an op that is made of others, so what
arrives there is exactly what the autocast kernel handed on: the op, its inputs' dtypes and its
dtype arguments.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from .._choice import choose
from .._torch import tensors_in
from ..contract import op_names
from ..errors import ArgumentError, OpPolicyError

__all__ = ["observe_policy"]

# Arguments that a kernel looks at before it casts: (op, argument) to a value.
_SPECIAL: dict[tuple[str, str], Any] = {}


class _SeenError(Exception):
    """Stops the op once it has been seen: shapes and kernels past the cast do not matter."""


def observe_policy(device_type: str, op: str, dtype: Any = "bf16") -> str:
    """The policy that autocast on ``device_type`` has for ``op`` in this torch, by observation.

    Runs the op on fake tensors three times: with all inputs float32, all low, and mixed. Needs no
    hardware, and no backend registered for the device type.

    Args:
        device_type: a device type such as ``"cuda"``.
        op: one overload, such as ``"softmax.int"`` or ``"torchvision::nms"``; or a bare name, which
            means torch's unnamed overload or, without one, the only one that takes the inputs.
        dtype: the region's dtype.

    Returns:
        A name of :class:`amphal.OpLists`' sets; ``"as_is"`` where nothing is cast.

    Raises:
        OpPolicyError: torch has no such op, it takes no tensors, or it cannot be observed: the
            message says why.
    """
    name, _ = choose.named_device(device_type, what="device_type")
    low = choose.named_precision(dtype, what="dtype")
    if low is torch.float32:
        raise ArgumentError("observe_policy() needs a low dtype, 'bf16' or 'fp16'")
    names = op_names.overloads(op)
    overload = op_names.op_overload(op if op in names else names[0])
    return observe_in(functools.partial(_region, name, low), name, overload, low)


def observe_in(
    region: Callable[[], AbstractContextManager[Any]],
    device: str,
    overload: torch._ops.OpOverload,
    low: torch.dtype,
) -> str:
    """The policy that ``overload`` has within ``region()``, an autocast region of ``device``."""
    try:
        full, lowered, mixed = (
            _watch(region, device, overload, itertools.cycle(dtypes))
            for dtypes in ((torch.float32,), (low,), (torch.float32, low))
        )
    except (RuntimeError, OpPolicyError) as exc:
        if "unsafe to autocast" in str(exc):
            return "banned"
        raise OpPolicyError(
            f"{overload} could not be observed on {device!r}: its autocast kernel failed before "
            f"it called on: {str(exc).splitlines()[0]}"
        ) from exc
    if not _tensor_dtypes(full):
        raise OpPolicyError(f"{overload} takes no tensors, so autocast casts nothing")
    return _judge(overload, low, full, lowered, mixed)


_Call = tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]


def _judge(op: Any, low: torch.dtype, full: _Call, lowered: _Call, mixed: _Call) -> str:
    if low in _tensor_dtypes(full):
        return "lower_precision"
    if torch.float32 in _dtype_arguments(lowered):
        return "fp32_set_opt_dtype" if lowered[0] is op else "fp32_append_dtype"
    if low not in _tensor_dtypes(lowered):
        return "fp32"
    if len(_tensor_dtypes(mixed)) > 1 and low not in _tensor_dtypes(mixed):
        return "promote"
    return "as_is"


def _watch(
    region: Callable[[], AbstractContextManager[Any]],
    device: str,
    op: torch._ops.OpOverload,
    dtypes: Iterator[Any],
) -> _Call:
    """What the autocast kernel of ``op`` called, given inputs of these dtypes in turn."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.inference_mode():
        args, kwargs = _arguments(op, device, dtypes)
        with region():
            return seen_by(op, op, args, kwargs)


def seen_by(op: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> _Call:
    """The first op of ``op``'s name that ``call(*args, **kwargs)`` reaches, and its arguments."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[_Call] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func._schema.name == op._schema.name:
                seen.append((func, args, kwargs or {}))
                raise _SeenError
            return func(*args, **(kwargs or {}))

    with Watch(), contextlib.suppress(_SeenError):  # type: ignore[no-untyped-call]
        call(*args, **kwargs)
    if not seen:
        raise RuntimeError("it called another op instead")
    return seen[0]


@contextlib.contextmanager
def _region(device: str, low: torch.dtype) -> Iterator[None]:
    # torch.autocast would ask whether the device is there.
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, low)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _arguments(op: Any, device: str, dtypes: Iterator[Any]) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for a in op._schema.arguments:
        if a.has_default_value():
            continue
        special = (op._schema.name.removeprefix("aten::"), a.name)
        value = _SPECIAL[special] if special in _SPECIAL else _value(a.type, device, dtypes)
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    return args, kwargs


_SCALARS: dict[str, Any] = {
    "IntType": 1,
    "SymIntType": 1,
    "FloatType": 0.5,
    "SymFloatType": 0.5,
    "NumberType": 0.5,
    "BoolType": False,
    "SymBoolType": False,
    "StringType": "dimname::N",  # a Dimname has this kind too, and must be qualified
    "OptionalType": None,
}


def _value(kind: Any, device: str, dtypes: Iterator[Any]) -> Any:
    name = kind.kind()
    if name == "TensorType":
        return torch.empty(2, 2, 2, 2, device=device, dtype=next(dtypes))
    if name == "ListType":
        return [_value(kind.getElementType(), device, dtypes) for _ in range(2)]
    if name == "TupleType":
        return tuple(_value(e, device, dtypes) for e in kind.elements())
    if name in _SCALARS:
        return _SCALARS[name]
    raise RuntimeError(f"an argument of type {kind} is not known here")


def _tensor_dtypes(call: _Call) -> list[torch.dtype]:
    _, args, kwargs = call
    return [t.dtype for t in tensors_in([*args, *kwargs.values()])]


def _dtype_arguments(call: _Call) -> list[torch.dtype]:
    _, args, kwargs = call
    return [v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)]
