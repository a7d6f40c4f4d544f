"""The order of a scaler's calls, checked alike whether it scales or not; and odd optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.scaler import problem

import amphal
from amphal.errors import ScalerStateError

ENABLED = pytest.mark.parametrize("enabled", [True, False])


def scaled(enabled: bool) -> tuple[torch.nn.Parameter, torch.optim.Optimizer, amphal.GradScaler]:
    param, optimizer = problem()
    scaler = amphal.GradScaler("cpu", enabled=enabled)
    scaler.scale(param.sum()).backward()
    return param, optimizer, scaler


@ENABLED
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("step", "step"),
        ("step", "step_all"),
        ("step_all", "step"),
        ("step", "unscale_"),
        ("unscale_", "unscale_"),
    ],
)
def test_calls_out_of_order_are_refused_whether_it_scales_or_not(
    enabled: bool, first: str, second: str
) -> None:
    """The same error, the weights untouched by the refused call, and update() cures it."""

    def call(name: str) -> None:
        getattr(scaler, name)([optimizer] if name == "step_all" else optimizer)

    param, optimizer, scaler = scaled(enabled)
    call(first)
    before = param.detach().clone()
    with pytest.raises(ScalerStateError, match="was called after"):
        call(second)
    assert torch.equal(param, before)
    if first == "unscale_":
        scaler.step(optimizer)
    scaler.update()
    scaler.scale(param.sum()).backward()
    call(second)


@ENABLED
def test_step_all_refuses_before_any_optimizer_is_stepped(enabled: bool) -> None:
    """One of the two was stepped already: the other one's weights do not move."""
    _, optimizer, scaler = scaled(enabled)
    other_param, other = problem()
    scaler.scale(other_param.sum()).backward()
    scaler.step(optimizer)
    before = other_param.detach().clone()
    with pytest.raises(ScalerStateError, match="was called after step"):
        scaler.step_all([other, optimizer])
    assert torch.equal(other_param, before)


class Slotted:
    """An optimizer wrapper that cannot be referred to weakly."""

    __slots__ = ("inner",)

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def step(self) -> None:
        return self.inner.step()


@ENABLED
def test_a_wrapper_without_weak_references_is_stepped(enabled: bool) -> None:
    """The weights are those of the optimizer alone, and the outcome is there."""
    plain, optimizer = problem()
    plain.sum().backward()
    optimizer.step()
    param, inner, scaler = scaled(enabled)
    wrapper: Any = Slotted(inner)
    scaler.step(wrapper)
    scaler.update()
    assert torch.equal(param, plain)
    assert scaler.outcome(wrapper).stepped


def test_the_state_of_an_optimizer_is_read_as_torchs() -> None:
    """Lightning reads ``["stage"]``; a key that is not a field is a KeyError as in a dict."""
    _, optimizer, scaler = scaled(True)
    state = scaler._per_optimizer_states[id(optimizer)]
    assert state["stage"].name == "READY"
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    assert state["stage"].name == "UNSCALED"
    assert [float(flag) for flag in state["found_inf_per_device"].values()] == [0.0]
    with pytest.raises(KeyError):
        state["nothing of the kind"]


@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("how", ["one parameter twice", "one gradient tensor"])
def test_a_gradient_that_an_optimizer_holds_twice_is_divided_once(how: str, fused: bool) -> None:
    """The weights equal those of the same step without a scaler, where torch divides twice."""

    def parameters() -> list[torch.nn.Parameter]:
        first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        return [first, first] if how == "one parameter twice" else [first, second]

    plain, params = parameters(), parameters()
    for parameter in plain:
        parameter.grad = plain[0].grad if plain[0].grad is not None else torch.full((3,), 2.0)
    torch.optim.SGD(plain, lr=0.125).step()
    scaler = amphal.GradScaler("cpu", enabled=True, init_scale=1024.0)
    scaler.scale(torch.ones(()))
    for parameter in params:
        parameter.grad = params[0].grad if params[0].grad is not None else torch.full((3,), 2048.0)
    scaler.step(torch.optim.SGD(params, lr=0.125, fused=fused))
    scaler.update()
    assert [p.tolist() for p in params] == [p.tolist() for p in plain]
