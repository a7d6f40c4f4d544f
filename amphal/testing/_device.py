"""A third-party device in pure Python, for tests: it computes, so a model trains on it.

:func:`install_device` gives torch's PrivateUse1 slot a name and a device whose memory is the CPU's.
Its tensors have the device type, the dispatch keys, the strides and the autograd of a real
accelerator's; storage is shared between views; nothing falls back to the CPU unseen: a CPU tensor
that meets one of them is an error, as on hardware. It has what a young backend has:

- allocation, views, copies to and from the CPU, autograd, random numbers;
- every dense kernel that the CPU has, with the CPU's numbers;
- no autocast kernels and no ``_amp_*`` kernels, so the package's own are what runs;
- one device, index 0, no streams; what is to be saved goes to the CPU first.

A process has one PrivateUse1 slot and cannot give it back: one name a process.
"""

from __future__ import annotations

from typing import Any

import torch

from .._torch import private
from ..errors import BackendError, TorchTooOldError

__all__ = ["install_device", "installed_device", "why_not_installable"]

_NO_KERNELS = ("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_")
_NOT_DENSE = ("sparse", "mkldnn", "quantize")

# What keeps the device alive: torch unregisters a Library's kernels with the object.
_libraries: list[torch.library.Library] = []
_name = ""


def why_not_installable() -> str:
    """Why this torch cannot have the device; empty if it can."""
    return private.why_no_python_device()


def installed_device() -> str:
    """The name that :func:`install_device` gave the device in this process; empty if none."""
    return _name


def install_device(name: str = "toy", module: Any = None) -> None:
    """Make ``torch.device(name)`` a device of this process, in pure Python.

    Args:
        name: the device type.
        module: what ``torch.<name>`` is to be (a vendor's module for its device); None for a
            minimal one.

    Raises:
        TorchTooOldError: torch is older than 2.10.
        BackendError: the slot of third-party devices is taken under another name.
    """
    global _name
    if _name == name:
        return
    reason = why_not_installable()
    if reason:
        raise TorchTooOldError(f"no pure-Python device {name!r}: {reason}")
    taken = private.privateuse1_name()
    if taken != "privateuseone":
        raise BackendError(
            f"torch has one slot for a third-party device and {taken!r} has it in this process; "
            f"test {name!r} in a process of its own"
        )
    private.setup_python_device(name, module)
    kernels = _library("aten")
    for op, kernel in {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "as_strided": _metadata(torch.ops.aten.as_strided.default),
        "view": _metadata(torch.ops.aten.view.default),
        "unfold": _metadata(torch.ops.aten.unfold.default),
        "_reshape_alias": _metadata(torch.ops.aten._reshape_alias.default),
        "resize_": _resize_,
        "set_.source_Storage_storage_offset": _set_,
        "_copy_from": _copy_from,
        "convolution_overrideable": _convolution,
        "convolution_backward_overrideable": _convolution_backward,
    }.items():
        kernels.impl(op, kernel, "PrivateUse1")
    everything_else = _library("_")
    everything_else.fallback(_on_the_cpu, "PrivateUse1")
    _libraries.extend((kernels, everything_else))
    _name = name


def _library(namespace: str) -> Any:  # torch leaves Library untyped
    return torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]


def _wrap(memory: torch.Tensor) -> torch.Tensor:
    """A tensor of the device over the memory of a CPU tensor."""
    return _rebind(private.empty_device_tensor(memory.dtype), memory)


def _rebind(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Let a tensor of the device lie over this CPU tensor, with its sizes and strides."""
    storage = tensor.untyped_storage()
    storage.memory = memory.untyped_storage()  # type: ignore[attr-defined]
    return _set_(tensor, storage, memory.storage_offset(), memory.size(), memory.stride())


def _unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor over the memory of a tensor of the device."""
    memory = tensor.untyped_storage().memory  # type: ignore[attr-defined]
    out = torch.empty(0, dtype=tensor.dtype)
    return out.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    return _wrap(
        torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    )


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _wrap(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))


def _metadata(op: Any) -> Any:
    """A kernel that changes sizes and strides alone: torch's own for tensors without data."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op.redispatch(private.META_KEYS, *args, **kwargs)

    return kernel


def _set_(tensor: torch.Tensor, storage: Any, *at: Any) -> torch.Tensor:
    op = torch.ops.aten.set_.source_Storage_storage_offset
    op.redispatch(private.META_KEYS, tensor, storage, *at)
    return tensor


def _resize_(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    return _rebind(tensor, _unwrap(tensor).resize_(size))


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    ends = [_unwrap(t) if t.device.type == _name else t for t in (source, target)]
    ends[1].copy_(ends[0])
    return target


def _convolution(*args: Any) -> Any:
    return _on_the_cpu(torch.ops.aten.convolution.default, *args)


def _convolution_backward(grad: Any, x: Any, weight: Any, *args: Any) -> Any:
    # torch's general kernel also wants the bias's sizes: one number an output channel.
    sizes = [grad.size(1)]
    return _on_the_cpu(torch.ops.aten.convolution_backward.default, grad, x, weight, sizes, *args)


def _on_the_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of every other op: the CPU's, on the same memory."""
    name = op._schema.name.removeprefix("aten::")
    if name in _NO_KERNELS or any(word in name for word in _NOT_DENSE):
        raise NotImplementedError(f"the test device {_name!r} has no kernel for {op}")
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id(memory): memory, its tensor

    def inside(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type == _name:
                memory = _unwrap(value)
                pairs[id(memory)] = memory, value
                return memory
            if value.dim() > 0:
                raise RuntimeError(f"{op} on {_name}:0 got a tensor that lies on {value.device}")
            return value
        if isinstance(value, (list, tuple)):
            return type(value)(inside(v) for v in value)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def outside(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return pairs[id(value)][1] if id(value) in pairs else _wrap(value)
        if isinstance(value, (list, tuple)):
            return type(value)(outside(v) for v in value)
        return value

    args = tuple(inside(a) for a in args)
    out = op(*args, **{k: inside(v) for k, v in kwargs.items()})
    for memory, tensor in pairs.values():
        if memory.size() != tensor.size():  # an out= that was given empty
            _rebind(tensor, memory)
    return outside(out)
