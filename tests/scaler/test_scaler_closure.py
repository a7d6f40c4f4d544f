"""Steps with a closure: each evaluation is unscaled and checked; an overflow puts all back."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.scaler import scaler_of

import amphal
from amphal.errors import ScalerStateError


class Problem:
    """A small regression whose losses can be made inf at chosen evaluations."""

    def __init__(
        self,
        make: Callable[..., Any],
        scaler: amphal.GradScaler | None,
    ) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)
        self.x, self.y = torch.randn(8, 3), torch.randn(8, 1)
        self.optimizer, self.scaler = make(self.net.parameters()), scaler
        self.evaluations = 0
        self.bad: set[int] = set()

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.net(self.x), self.y)
        self.evaluations += 1
        if self.evaluations in self.bad:
            loss = loss * math.inf
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    def parameters(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()]).clone()


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def fused_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1, fused=True)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization: climbs by the gradient at hand, then steps by the closure's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05, "lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["climb"] = p.grad * (0.05 / (norm + 1e-12))
            p.add_(self.state[p]["climb"])
        with torch.enable_grad():
            loss = closure()
        for p in params:
            p.sub_(self.state[p]["climb"])
            p.sub_(p.grad, alpha=0.1)
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
        return loss


@pytest.mark.parametrize("make", [lbfgs, adam, fused_adam])
@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_gives_the_unscaled_optimizers_result(
    make: Callable[..., Any], keyword: bool
) -> None:
    """With scaling by a power of two the parameters equal those without any scaler."""
    scaler = scaler_of()
    ours, plain = Problem(make, scaler), Problem(make, None)
    for _ in range(3):
        if keyword:
            loss = scaler.step(ours.optimizer, closure=ours.closure)
        else:
            loss = scaler.step(ours.optimizer, ours.closure)
        scaler.update()
        expected = plain.optimizer.step(plain.closure)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(ours.parameters(), plain.parameters())
        assert scaler.outcome(ours.optimizer).stepped
    assert ours.evaluations == plain.evaluations
    assert scaler.steps == 3


@pytest.mark.parametrize(
    ("make", "bad"),
    # Adam evaluates its closure once a step.
    [(lbfgs, 1), (lbfgs, 2), (lbfgs, 3), (adam, 1), (fused_adam, 1)],
)
def test_an_evaluation_that_is_not_finite_puts_everything_back(
    make: Callable[..., Any], bad: int
) -> None:
    """Parameters and optimizer state are as before the step, the scale backs off once."""
    scaler = scaler_of()
    ours = Problem(make, scaler)
    scaler.step(ours.optimizer, ours.closure)
    scaler.update()
    before = ours.parameters()
    state = copy.deepcopy(ours.optimizer.state_dict())
    ours.bad = {ours.evaluations + bad}
    assert scaler.step(ours.optimizer, ours.closure) is None
    scaler.update()
    assert scaler.outcome(ours.optimizer).skipped
    assert scaler.get_scale() == 32768.0
    assert torch.equal(ours.parameters(), before)
    after = ours.optimizer.state_dict()
    assert str(after) == str(state)
    scaler.step(ours.optimizer, ours.closure)
    scaler.update()
    assert scaler.outcome(ours.optimizer).stepped


@pytest.mark.parametrize("bad", [None, "first", "second"])
def test_two_pass_optimizers(bad: str | None) -> None:
    """SAM climbs by unscaled gradients; an overflow in either pass skips and restores."""
    scaler = scaler_of()
    ours, plain = Problem(SAM, scaler), Problem(SAM, None)
    for problem in (ours, plain):
        problem.closure()
    if bad == "first":
        assert ours.net.weight.grad is not None
        ours.net.weight.grad.fill_(math.inf)
    elif bad == "second":
        ours.bad = {2}
    before = ours.parameters()
    scaler.step(ours.optimizer, ours.closure)
    scaler.update()
    assert scaler.outcome(ours.optimizer).skipped is (bad is not None)
    if bad is None:
        plain.optimizer.step(plain.closure)
        torch.testing.assert_close(ours.parameters(), plain.parameters())
        assert not torch.equal(ours.parameters(), before)
    else:
        assert torch.equal(ours.parameters(), before)
        assert all("steps" not in state for state in ours.optimizer.state.values())
        assert scaler.get_scale() == 32768.0
        ours.bad = set()
        ours.closure()
        scaler.step(ours.optimizer, ours.closure)
        scaler.update()
        assert scaler.outcome(ours.optimizer).stepped


def test_stale_gradients_of_a_skipped_step_do_not_skip_the_next() -> None:
    """What is left in .grad from an earlier iteration is not looked at."""
    scaler = scaler_of()
    ours = Problem(lbfgs, scaler)
    ours.bad = {1}
    scaler.step(ours.optimizer, ours.closure)
    scaler.update()
    assert ours.net.weight.grad is not None
    assert not ours.net.weight.grad.isfinite().all()
    scaler.step(ours.optimizer, ours.closure)
    scaler.update()
    assert scaler.outcome(ours.optimizer).stepped


def test_gradients_unscaled_before_a_two_pass_step_are_not_unscaled_again() -> None:
    """unscale_ before the step is allowed, as it is without a closure."""
    scaler = scaler_of()
    ours, plain = Problem(SAM, scaler), Problem(SAM, None)
    for problem in (ours, plain):
        problem.closure()
    scaler.unscale_(ours.optimizer)
    scaler.step(ours.optimizer, ours.closure)
    plain.optimizer.step(plain.closure)
    torch.testing.assert_close(ours.parameters(), plain.parameters())


def test_a_closure_that_does_not_scale_is_an_error() -> None:
    """Its gradients would be divided by a scale that they never had."""
    scaler = scaler_of()
    ours = Problem(adam, None)
    with pytest.raises(ScalerStateError, match=r"closure did not call scaler\.scale"):
        scaler.step(ours.optimizer, ours.closure)
    assert scaler.get_scale() == 65536.0


def test_a_disabled_scaler_passes_the_closure_on() -> None:
    """The optimizer gets the closure itself, and its result comes back."""
    scaler = amphal.GradScaler("cpu", enabled=False)
    ours, plain = Problem(lbfgs, scaler), Problem(lbfgs, None)
    loss = scaler.step(ours.optimizer, ours.closure)
    scaler.update()
    torch.testing.assert_close(loss, plain.optimizer.step(plain.closure))
    assert torch.equal(ours.parameters(), plain.parameters())


def test_none_is_no_closure() -> None:
    """Frameworks pass closure=None, by position or by name."""
    scaler = scaler_of()
    ours = Problem(adam, scaler)
    for args, kwargs in (((None,), {}), ((), {"closure": None})):
        ours.closure()
        scaler.step(ours.optimizer, *args, **kwargs)
        scaler.update()
        assert scaler.outcome(ours.optimizer).stepped


def test_stepping_twice_with_a_closure_is_an_error() -> None:
    """The order of calls is the same with a closure."""
    scaler = scaler_of()
    ours = Problem(lbfgs, scaler)
    scaler.step(ours.optimizer, ours.closure)
    with pytest.raises(ScalerStateError, match=r"scaler\.update\(\) first"):
        scaler.step(ours.optimizer, ours.closure)


@pytest.mark.parametrize("first_is_bad", [True, False])
def test_gradients_of_an_earlier_step_are_not_taken_for_new_ones(first_is_bad: bool) -> None:
    """After an overflow LBFGS steps again, though another optimizer's loss was scaled before."""
    other, param = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    sgd = torch.optim.SGD([other], lr=0.1)
    optimizer = torch.optim.LBFGS([param], max_iter=3)
    scaler, bad, skipped = scaler_of(), [first_is_bad], []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum() * (math.inf if bad[0] else 1)
        scaler.scale(loss).backward()
        return loss

    for _ in range(3):
        sgd.zero_grad()
        scaler.scale((other**2).sum()).backward()
        scaler.step(sgd)
        scaler.step(optimizer, closure)
        skipped.append(scaler.outcome(optimizer).skipped)
        scaler.update()
        bad[0] = False
    assert skipped == [first_is_bad, False, False]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_region_around_the_step_casts_the_weights_anew(enabled: bool) -> None:
    """Evaluations inside an outer region see the weights as the optimizer has moved them."""
    losses: dict[bool, Any] = {}
    for outer in (True, False):
        torch.manual_seed(0)
        net, x = torch.nn.Linear(4, 4), torch.randn(8, 4)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
        scaler = amphal.GradScaler("cpu", enabled=enabled)
        seen = losses[outer] = []

        def closure(
            net: torch.nn.Module = net,
            x: torch.Tensor = x,
            optimizer: torch.optim.Optimizer = optimizer,
            scaler: amphal.GradScaler = scaler,
            seen: list[float] = seen,
            outer: bool = outer,
        ) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=True, cache_enabled=True):
                loss = net(x).float().square().mean()
            seen.append(loss.item())
            scaler.scale(loss).backward()
            return loss

        with torch.autocast("cpu", torch.bfloat16, enabled=outer):
            scaler.step(optimizer, closure)
    assert losses[True] == losses[False]
    assert len(set(losses[True])) > 1


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_an_error_inside_a_closure_puts_the_parameters_back(kind: type[Exception]) -> None:
    """Whatever is raised passes through, with the parameters and the state as they were."""
    param = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.LBFGS([param], lr=0.1, max_iter=4)
    scaler, calls = scaler_of(), [0]

    def closure() -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise kind
        optimizer.zero_grad()
        loss = (param**2).sum()
        scaler.scale(loss).backward()
        return loss

    with pytest.raises(kind):
        scaler.step(optimizer, closure)
    assert param.tolist() == [1.0, 2.0]
    assert not optimizer.state
    scaler.step(optimizer, closure)
    assert scaler.outcome(optimizer).stepped


def test_named_tuples_in_an_optimizers_state_are_copied() -> None:
    """They take their fields one by one."""
    pair = collections.namedtuple("pair", "a b")
    param = torch.nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.LBFGS([param])
    optimizer.state["x"] = pair(1, torch.ones(1))
    scaler = scaler_of()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.sum() * math.nan
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)
    assert optimizer.state["x"] == pair(1, torch.ones(1))
