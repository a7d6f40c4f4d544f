"""The scaler inside transforms of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import amphal

TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": torch.func.grad,
    "grad of grad": lambda f: torch.func.grad(lambda w: torch.func.grad(f)(w).sum()),
    "vmap": torch.func.vmap,
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f)),
    "jvp": lambda f: lambda w: torch.func.jvp(f, (w,), (torch.ones_like(w),)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_the_first_loss_may_be_scaled_in_a_transform(transform: Callable[[Any], Any]) -> None:
    """The scale that is made there outlives it: the steps after it are right."""
    scaler = amphal.GradScaler("cpu", enabled=True, init_scale=8.0)
    transform(lambda w: scaler.scale((w**3).sum()))(torch.ones(2))
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale((param * 2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert param.tolist() == [-3.0, -3.0]
    assert scaler.get_scale() == 8.0
    assert scaler.steps == 2


def test_the_gradient_is_scaled() -> None:
    """By the first scale, as with a scaler that was used before."""
    scaler = amphal.GradScaler("cpu", enabled=True, init_scale=8.0)
    found = torch.func.grad(lambda w: scaler.scale((w * 2).sum()))(torch.ones(2))
    assert found.tolist() == [16.0, 16.0]
