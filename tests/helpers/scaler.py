"""A scaler, a problem of one parameter, and a count of host syncs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import amphal


def scaler_of(**kwargs: Any) -> amphal.GradScaler:
    return amphal.GradScaler("cpu", enabled=True, **kwargs)


def problem(
    fused: bool | None = False, lr: float = 0.1, kind: Any = torch.optim.AdamW, **kwargs: Any
) -> tuple[torch.nn.Parameter, Any]:
    """A parameter of three ones, and an optimizer of ``kind`` over it."""
    param = torch.nn.Parameter(torch.ones(3))
    return param, kind([param], lr=lr, fused=fused, **kwargs)


def backward(scaler: torch.amp.GradScaler, param: torch.Tensor, gradient: float = 1.0) -> None:
    param.grad = None
    scaler.scale((param * gradient).sum()).backward()


def iterate(
    scaler: torch.amp.GradScaler, param: torch.Tensor, optimizer: Any, gradient: float = 1.0
) -> None:
    backward(scaler, param, gradient)
    scaler.step(optimizer)
    scaler.update()


class Syncs(TorchDispatchMode):
    """Counts the reads of a device value by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
