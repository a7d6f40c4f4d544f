"""A backward pass after ``unscale_`` or ``clip_grad_norm_`` that adds to the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amphal
from amphal.errors import ScalerStateError

X = torch.ones(1, 2)
Loop = Callable[[amphal.GradScaler, nn.Module, Any], None]


def made(fused: bool) -> tuple[amphal.GradScaler, nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    return amphal.GradScaler("cpu", enabled=True, init_scale=1024.0, model=model), model, optimizer


def backward(scaler: amphal.GradScaler, model: nn.Module, share: float = 1.0) -> None:
    scaler.scale(model(X).sum() * share).backward()


def unscale_between(s: amphal.GradScaler, m: nn.Module, o: Any) -> None:
    backward(s, m, 0.5)
    s.unscale_(o)
    backward(s, m, 0.5)


def clip_between(s: amphal.GradScaler, m: nn.Module, o: Any) -> None:
    backward(s, m, 0.5)
    s.clip_grad_norm_(o, 1e9)
    backward(s, m, 0.5)


def second_pass(s: amphal.GradScaler, m: nn.Module, o: Any) -> None:
    backward(s, m)
    s.unscale_(o)
    o.zero_grad()
    backward(s, m)


def second_pass_in_place(s: amphal.GradScaler, m: nn.Module, o: Any) -> None:
    backward(s, m)
    s.unscale_(o)
    o.zero_grad(set_to_none=False)
    backward(s, m)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("together", [False, True], ids=["step", "step_all"])
@pytest.mark.parametrize("loop", [unscale_between, clip_between, second_pass, second_pass_in_place])
def test_it_is_refused_by_name(loop: Loop, together: bool, fused: bool) -> None:
    """The weights stay as they are; after ``zero_grad`` and ``update`` the loop goes on."""
    scaler, model, optimizer = made(fused)
    before = model.weight.detach().clone()
    loop(scaler, model, optimizer)
    with pytest.raises(ScalerStateError, match=r"weight: a backward pass came after unscale_"):
        scaler.step_all([optimizer]) if together else scaler.step(optimizer)
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    scaler.update()
    backward(scaler, model)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(model.weight.detach(), before - 1)


def test_clipping_again_is_refused_too() -> None:
    """The norm would be that of a sum of scaled and unscaled gradients."""
    scaler, model, optimizer = made(False)
    unscale_between(scaler, model, optimizer)
    with pytest.raises(ScalerStateError, match="backward pass"):
        scaler.clip_grad_norm_(optimizer, 1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_another_model_may_run_backward_between(fused: bool) -> None:
    """Two optimizers: the loss of the second is scaled after the first is unscaled."""
    scaler, model, optimizer = made(fused)
    other = nn.Linear(2, 2, bias=False)
    second = torch.optim.SGD(other.parameters(), lr=1.0, fused=fused)
    before = model.weight.detach().clone(), other.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        second.zero_grad()
        backward(scaler, model)
        scaler.clip_grad_norm_(optimizer, 1e9)
        backward(scaler, other)
        scaler.unscale_(second)
        scaler.step(optimizer)
        scaler.step(second)
        scaler.update()
    torch.testing.assert_close(model.weight.detach(), before[0] - 2)
    torch.testing.assert_close(other.weight.detach(), before[1] - 2)


def test_two_passes_with_update_between() -> None:
    """What the message advises for SAM written by hand."""
    scaler, model, optimizer = made(False)
    before = model.weight.detach().clone()
    backward(scaler, model)
    scaler.unscale_(optimizer)
    assert model.weight.grad is not None
    ascent = model.weight.grad.clone()
    with torch.no_grad():
        model.weight += ascent
    scaler.update()
    optimizer.zero_grad()
    backward(scaler, model)
    with torch.no_grad():
        model.weight -= ascent
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(model.weight.detach(), before - 1)


def test_edits_by_hand_are_the_users() -> None:
    """Clipping by value and by hand between ``unscale_`` and ``step`` moves the version too."""
    scaler, model, optimizer = made(False)
    before = model.weight.detach().clone()
    backward(scaler, model)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_(model.parameters(), 0.25)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(model.weight.detach(), before - 0.25)
