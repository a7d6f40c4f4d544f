"""A hundred thousand steps of adversarial overflow."""

from __future__ import annotations

import math
import random

import pytest
import torch
from test_scaler import scaler_of

import amphal


def gradients(draw):
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


@pytest.mark.parametrize("fused", [False, True])
def test_fifty_thousand_adversarial_steps(fused):
    """No parameter is ever not finite and the scale stays in its bounds, through every collapse."""
    draw = random.Random(7)
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1e-3, fused=fused)
    low, high = 2.0**-126, 2.0**100
    scaler = scaler_of(max_scale=high, growth_interval=2, growth_factor=4.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.zeros(2)
    collapses = 0
    for number, value in zip(range(50_000), gradients(draw), strict=False):
        param.grad[0] = value
        if number % 3 == 0:
            scaler.unscale_(optimizer)
        elif number % 3 == 1:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        try:
            scaler.update()
        except amphal.ScaleCollapseError:
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
