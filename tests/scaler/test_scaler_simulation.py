"""A hundred thousand steps of adversarial overflow."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.scaler import scaler_of

from amphal.errors import ScaleCollapseError


def gradients(draw: Any) -> Iterator[Any]:
    """Endless patterns: bursts of overflow, long calm, alternation, values at the edge."""
    while True:
        kind = draw.randrange(5)
        length = draw.choice([1, 3, 20, 170])
        for i in range(length):
            if kind == 0:
                yield draw.choice([math.inf, -math.inf, math.nan])
            elif kind == 1:
                yield draw.uniform(-1, 1)
            elif kind == 2:
                yield math.nan if i % 2 else 1.0
            elif kind == 3:
                yield draw.choice([3.4e38, -3.4e38, 1e30, 1e-30, 2.0**-149, 0.0])
            else:
                yield draw.choice([1.0, 1.0, 1.0, math.inf, 1e38])


class Bare:
    """SGD with nothing around it: torch's kernels, none of torch.optim's bookkeeping."""

    def __init__(self, param: torch.nn.Parameter, fused: bool) -> None:
        self.param_groups = [{"params": [param]}]
        self.state: dict[Any, Any] = {}
        self.grad_scale: torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None
        self._step_supports_amp_scaling = fused
        self._param = param

    def step(self) -> None:
        assert self._param.grad is not None
        if not self._step_supports_amp_scaling:
            with torch.no_grad():
                self._param.sub_(self._param.grad, alpha=1e-3)
            return
        torch._fused_sgd_(
            [self._param.detach()],
            [self._param.grad],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=1e-3,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )


@pytest.mark.parametrize("fused", [False, True])
def test_fifty_thousand_adversarial_steps(fused: bool) -> None:
    """No parameter is ever not finite and the scale stays in its bounds, through every collapse."""
    draw = random.Random(7)
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer: Any = Bare(param, fused)
    low, high = 2.0**-126, 2.0**100
    scaler = scaler_of(max_scale=high, growth_interval=2, growth_factor=4.0)
    scaler.scale(torch.ones(()))
    collapses = 0
    for number, value in zip(range(50_000), gradients(draw), strict=False):
        param.grad = torch.tensor([value, 0.5])
        if number % 8 == 3:
            scaler.unscale_(optimizer)
        elif number % 8 == 7:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        try:
            scaler.update()
        except ScaleCollapseError:
            collapses += 1
        with torch.no_grad():
            if number % 16 == 0:
                assert param.isfinite().all()
                assert low <= scaler.get_scale() <= high
                param.zero_()  # so that finite steps cannot add up to inf
    assert collapses > 0
    assert scaler.steps > 1000
    assert scaler.skipped > 1000
    assert scaler.steps + scaler.skipped == 50_000
