"""A gradient is divided by the scale once, whoever holds it, and by the scale it carries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.scaler import scaler_of

from amphal.errors import ScalerStateError

FUSED = pytest.mark.parametrize("fused", [False, True])


def sgd(*params: Any, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0, fused=fused)


def ones(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]


@FUSED
@pytest.mark.parametrize("how", ["step", "step_all", "unscale_", "clip", "clip one"])
@pytest.mark.parametrize("iteration", [0, 1, 2])
def test_two_optimizers_share_a_parameter(
    fused: bool, how: str, iteration: int, memory: str
) -> None:
    """Both step with the true gradient 2: the shared weight moves by 4, the others by 2."""
    shared, first, second = ones(3)
    a, b = sgd(shared, first, fused=fused), sgd(shared, second, fused=fused)
    scaler = scaler_of(init_scale=1024.0)
    for _ in range(iteration + 1):
        with torch.no_grad():
            for param in (shared, first, second):
                param.fill_(1.0).grad = None
        scaler.scale(((shared + first + second) * 2).sum()).backward()
        if how == "unscale_":
            scaler.unscale_(a)
            scaler.unscale_(b)
            assert shared.grad is not None
            assert shared.grad.tolist() == [2.0, 2.0]
        elif how.startswith("clip"):
            assert scaler.clip_grad_norm_(a, 1e9).item() == pytest.approx(4.0)
            assert how == "clip one" or scaler.clip_grad_norm_(b, 1e9).item() == pytest.approx(4.0)
        if how == "step_all":
            scaler.step_all([a, b])
        else:
            scaler.step(a)
            scaler.step(b)
        scaler.update()
    assert [p[0].item() for p in (shared, first, second)] == [-3.0, -1.0, -1.0]


@FUSED
def test_a_new_backward_pass_between_the_steps_is_divided(fused: bool) -> None:
    """With the gradient made anew between two steps both are divided."""
    (shared,) = ones(1)
    a, b = sgd(shared, fused=fused), sgd(shared, fused=fused)
    scaler = scaler_of(init_scale=1024.0)
    for optimizer, gradient in ((a, 2.0), (b, 4.0)):
        shared.grad = None
        scaler.scale((shared * gradient).sum()).backward()
        scaler.step(optimizer)
    scaler.update()
    assert shared.tolist() == [-5.0, -5.0]


@FUSED
def test_an_overflow_skips_both(fused: bool) -> None:
    """A shared gradient that is not finite skips the steps of both optimizers."""
    shared, other = ones(2)
    a, b = sgd(shared, fused=fused), sgd(shared, other, fused=fused)
    scaler = scaler_of(init_scale=1024.0)
    scaler.scale((shared * float("inf") + other).sum()).backward()
    scaler.step(a)
    scaler.step(b)
    scaler.update()
    assert shared.tolist() == other.tolist() == [1.0, 1.0]
    assert scaler.outcome(a).skipped
    assert scaler.outcome(b).skipped


def test_clipping_by_hand_between_two_unscale() -> None:
    """A gradient that the user has changed after unscale_ is still unscaled."""
    (shared,) = ones(1)
    a, b = sgd(shared), sgd(shared)
    scaler = scaler_of(init_scale=1024.0)
    scaler.scale((shared * 4).sum()).backward()
    scaler.unscale_(a)
    assert shared.grad is not None
    shared.grad.mul_(0.5)
    scaler.unscale_(b)
    assert shared.grad.tolist() == [2.0, 2.0]


@FUSED
@pytest.mark.parametrize("overflow", [False, True])
def test_update_between_the_steps(fused: bool, overflow: bool) -> None:
    """The second optimizer's gradients are divided by the scale they carry, not the new one."""
    first, second = ones(2)
    a, b = sgd(first, fused=fused), sgd(second, fused=fused)
    scaler = scaler_of(init_scale=16.0, growth_interval=1)
    for right in (-1.0, -3.0):
        first.grad = second.grad = None
        scaler.scale((first * (float("inf") if overflow else 1) + second * 2).sum()).backward()
        for optimizer in (a, b):
            scaler.step(optimizer)
            scaler.update()
        assert second.tolist() == [right, right]


@FUSED
def test_accumulation_across_an_update(fused: bool) -> None:
    """Gradients of an optimizer that waits take the new scale, so that sums are right."""
    often, seldom = ones(2)
    a, b = sgd(often, fused=fused), sgd(seldom, fused=fused)
    scaler = scaler_of(init_scale=16.0, growth_interval=1)
    scaler.scale((often + seldom).sum()).backward()
    scaler.step(a)
    scaler.step(b)
    scaler.update()
    seldom.grad = None
    for _ in range(2):
        often.grad = None
        scaler.scale((often + seldom * 0.5).sum()).backward()
        scaler.step(a)
        assert seldom.grad is not None
        if seldom.grad[0] > scaler.get_scale() / 2:
            scaler.step(b)
        scaler.update()
    assert seldom.tolist() == [-1.0, -1.0]


@FUSED
@pytest.mark.parametrize("how", ["update", "load"])
@pytest.mark.parametrize("known", [False, True])
def test_the_scale_is_set_between_backward_and_step(fused: bool, how: str, known: bool) -> None:
    """The step is by the true gradient, whatever the scale was set to meanwhile."""
    (param,) = ones(1)
    optimizer, scaler = sgd(param, fused=fused), scaler_of(init_scale=16.0)
    for _ in range(3 if known else 0):
        param.grad = None
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    param.grad = None
    scaler.scale((param * 2).sum()).backward()
    before = param[0].item()
    if how == "update":
        scaler.unscale_(sgd(*ones(1)))
        scaler.update(64.0)
    else:
        scaler.load_state_dict(scaler_of(init_scale=64.0).state_dict())
    scaler.step(optimizer)
    assert before - param[0].item() == 2.0


@FUSED
def test_the_same_gradient_is_stepped_with_twice(fused: bool) -> None:
    """Steps without a backward pass between them use the same gradient, as without a scaler."""
    param, other = ones(2)
    optimizer, scaler = sgd(param, other, fused=fused), scaler_of(init_scale=16.0)
    scaler.scale((param * 2 + other).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    other.grad = None
    scaler.scale(other.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (param[0].item(), other[0].item()) == (-3.0, -1.0)


def test_a_second_optimizer_that_comes_late_is_refused_by_name() -> None:
    """What cannot be known is refused, and the next iteration is right."""
    model = torch.nn.Linear(1, 1, bias=False)
    a, b = sgd(model.weight), sgd(model.weight)
    scaler = scaler_of(init_scale=16.0, model=model)

    def iteration(*optimizers: Any) -> None:
        model.weight.grad = None
        scaler.scale((model.weight * 2).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        iteration(a)
    with pytest.raises(ScalerStateError, match=r"weight: shared with a SGD"):
        iteration(a, b)
    scaler.update()
    before = model.weight.item()
    iteration(a, b)
    assert model.weight.item() == pytest.approx(before - 4.0)
