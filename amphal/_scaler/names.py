"""Parameters by name, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .._torch import private

__all__ = ["elsewhere", "listed", "names_of", "names_of_half", "names_of_nonfinite"]


def _parameter_name(names: Mapping[int, str], param: Tensor, group: int, index: int) -> str:
    """The qualified name if the model is known, else where the optimizer holds it."""
    return names.get(id(param)) or f"group {group}, param {index}, shape {tuple(param.shape)}"


def _named(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            yield _parameter_name(names, param, number, index), param


def names_of_nonfinite(optimizers: Iterable[Any], names: Mapping[int, str]) -> list[str]:
    """The parameters whose gradients hold inf or NaN now. Reads the device: for errors only."""
    found = []
    for optimizer in optimizers:
        for name, param in _named(optimizer, names):
            if param.grad is not None and not _is_finite(param.grad):
                found.append(name)
    return found


def _is_finite(grad: Any) -> bool:
    local = grad.to_local() if hasattr(grad, "to_local") else grad  # a DTensor's shard
    if local.layout is not torch.strided:
        local = local._values() if local.is_sparse else local.values()
    return bool(torch.isfinite(local).all())


def names_of_half(optimizer: Any, names: Mapping[int, str]) -> list[str]:
    """The parameters whose gradients are float16."""
    return [
        name
        for name, param in _named(optimizer, names)
        if param.grad is not None and param.grad.dtype is torch.float16
    ]


def names_of(params: Iterable[Tensor], names: Mapping[int, str]) -> list[str]:
    """These parameters, without their optimizer."""
    return [names.get(id(p)) or f"a parameter of shape {tuple(p.shape)}" for p in params]


def elsewhere(otherwise: str) -> str:
    """What to say if no gradient here is to blame: a rank sees its own part only."""
    import torch.distributed as dist

    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not several:
        return otherwise
    return f"none on rank {dist.get_rank()}, so those of another rank, or {otherwise}"


def listed(names: list[str], most: int = 8) -> str:
    """Some of the names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


private.not_as_frames(__name__)
