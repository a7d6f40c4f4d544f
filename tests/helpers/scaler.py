"""A scaler, a problem of one parameter, and a count of host syncs."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import amphal


def scaler_of(**kwargs):
    return amphal.GradScaler("cpu", enabled=True, **kwargs)


def problem(fused=False, lr=0.1, kind=torch.optim.AdamW, **kwargs):
    param = torch.nn.Parameter(torch.ones(3))
    return param, kind([param], lr=lr, fused=fused, **kwargs)


def backward(scaler, param, gradient=1.0):
    param.grad = None
    scaler.scale((param * gradient).sum()).backward()


def iterate(scaler, param, optimizer, gradient=1.0):
    backward(scaler, param, gradient)
    scaler.step(optimizer)
    scaler.update()


class Syncs(TorchDispatchMode):
    """Counts the reads of a device value by the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
