"""Gradients that differ between ranks in a way that could make one of them wait for ever."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import amphal
from amphal.errors import ArgumentError, NonFiniteGradientError, ScaleCollapseError


def parameter(*values: float) -> nn.Parameter:
    """A parameter spread over the two ranks, with itself as its gradient."""
    mesh = init_device_mesh("cpu", (2,))
    made = nn.Parameter(distribute_tensor(torch.tensor(values), mesh, [Shard(0)]))
    made.grad = distribute_tensor(torch.tensor(values), mesh, [Shard(0)])
    return made


def plain(bad: bool) -> nn.Parameter:
    """A parameter that each rank has in full, with a gradient that is bad on rank 1 alone."""
    made = nn.Parameter(torch.ones(4))
    made.grad = torch.ones(4)
    if bad and dist.get_rank() == 1:
        made.grad[0] = math.inf
    return made


def started(enabled: bool = True, model: nn.Module | None = None) -> amphal.GradScaler:
    group = dist.group.WORLD
    scaler = amphal.GradScaler(
        "cpu", 2.0, enabled=enabled, min_scale=2.0, process_group=group, model=model
    )
    scaler.scale(torch.ones(()))
    return scaler


def largest(unscaled: bool) -> float:
    params = [parameter(3.0), parameter(1.0, 2.0, 1.0, 2.0)]
    scaler, opt = started(), torch.optim.SGD(params, lr=0.1)
    if unscaled:
        scaler.unscale_(opt)
    what = opt if unscaled else params
    return float(scaler.clip_grad_norm_(what, 1.0, math.inf))


@pytest.mark.parametrize("unscaled", [True, False])
def test_infinity_norm_with_an_empty_shard(two_ranks: Ranks, unscaled: bool) -> None:
    """A parameter of one element leaves a rank nothing, of which torch's kernel has no inf-norm."""
    assert two_ranks(largest, unscaled) == [1.5, 1.5]


def clip_parameters() -> tuple[float, bool]:
    params = [parameter(1.0, 1.0, 1.0, 1.0), plain(bad=True)]
    scaler, opt = started(), torch.optim.SGD(params, lr=0.1)
    norm = float(scaler.clip_grad_norm_(params, 1.0))
    scaler.step(opt)
    return norm, scaler.outcome(opt).skipped


def test_clips_parameters_of_which_one_rank_has_an_inf(two_ranks: Ranks) -> None:
    """The rank that sees the inf starts no collective of which the other knows nothing."""
    assert two_ranks(clip_parameters) == [(pytest.approx(2**0.5), True), (math.inf, True)]


def refused(enabled: bool, sharded: bool, by_optimizer: bool, empty: bool) -> str:
    params = [plain(bad=True)]
    if sharded:
        params.append(parameter(1.0, 1.0, 1.0, 1.0))
    if empty and dist.get_rank() == 0:
        params[0].grad = None
    scaler, opt = started(enabled), torch.optim.SGD(params, lr=0.1)
    with pytest.raises(NonFiniteGradientError) as caught:
        scaler.clip_grad_norm_(opt if by_optimizer else params, 1.0, error_if_nonfinite=True)
    return str(caught.value)


@pytest.mark.parametrize(
    ("enabled", "sharded", "by_optimizer", "empty"),
    [
        (True, False, True, False),
        (True, False, True, True),
        (True, True, True, False),
        (True, True, False, False),
        (False, False, True, False),
    ],
)
def test_error_if_nonfinite_is_raised_on_all(
    two_ranks: Ranks, enabled: bool, sharded: bool, by_optimizer: bool, empty: bool
) -> None:
    """What one rank finds is raised on each, and none goes on to wait in its step."""
    here, there = two_ranks(refused, enabled, sharded, by_optimizer, empty)
    assert "Not finite: none on rank 0, so those of another rank" in here
    assert "Not finite: group 0, param 0" in there


def error_if_finite(enabled: bool) -> float:
    params = [plain(bad=False), parameter(1.0, 1.0, 1.0, 1.0)]
    scaler, opt = started(enabled), torch.optim.SGD(params, lr=0.1)
    norm: Tensor = scaler.clip_grad_norm_(opt, 1.0, error_if_nonfinite=True)
    return float(norm)


@pytest.mark.parametrize("enabled", [True, False])
def test_error_if_nonfinite_lets_others_pass(two_ranks: Ranks, enabled: bool) -> None:
    """Finite gradients are clipped as without it."""
    norm = 8**0.5 / (2 if enabled else 1)
    assert two_ranks(error_if_finite, enabled) == pytest.approx([norm] * 2)


def collapse() -> str:
    model = nn.Linear(4, 1, bias=False)
    model.weight.grad = torch.ones(1, 4)
    if dist.get_rank() == 1:
        model.weight.grad[0] = math.nan
    scaler, opt = started(model=model), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.step(opt)
    with pytest.raises(ScaleCollapseError) as caught:
        scaler.update()
    return str(caught.value)


def test_collapse_says_that_another_rank_has_the_gradient(two_ranks: Ranks) -> None:
    """All ranks raise at once; the one without the NaN does not blame an earlier step alone."""
    here, there = two_ranks(collapse)
    assert "not finite: none on rank 0, so those of another rank" in here
    assert "not finite: weight. No parameter" in there


def monitored(precision: str, skip: str, fused: bool) -> tuple[list[bool], int, float, bool]:
    plan = amphal.detect("cpu", precision=precision)
    param = nn.Parameter(torch.ones(4))
    opt = torch.optim.SGD([param], lr=0.1, fused=fused)
    scaler = amphal.GradScaler(plan, process_group=dist.group.WORLD)
    monitor = amphal.GradMonitor(opt, skip=skip, warmup=2)
    skips = []
    for step in range(5):
        scaler.scale(torch.ones(()))
        param.grad = torch.full((4,), scaler.get_scale())
        if step == 3 and dist.get_rank() == 1:
            param.grad *= 100 if skip == "spike" else math.inf
        monitor.step(opt, scaler)
        scaler.update()
        skips.append(monitor.outcome.skipped)
        if step == 3:
            alarmed = not monitor.last.ok
    return skips, monitor.skipped, param[0].item(), alarmed


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("precision", "skip"), [("fp16", "spike"), ("bf16", "spike"), ("bf16", "nonfinite")]
)
def test_monitors_skip_together(two_ranks: Ranks, precision: str, skip: str, fused: bool) -> None:
    """A spike on one rank skips the step on all, also where the scaler is off; one health each."""
    (*here, seen_here), (*there, seen_there) = two_ranks(monitored, precision, skip, fused)
    assert here == there == [[False] * 3 + [True, False], 1, pytest.approx(0.6)]
    assert (seen_here, seen_there) == (False, True)


def clip_flattened(original: bool, enabled: bool) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=original
    )
    scaler, opt = started(enabled), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    with pytest.raises(ArgumentError) as caught:
        scaler.clip_grad_norm_(opt, 1.0)
    scaler.unscale_(opt)
    assert float(model.clip_grad_norm_(1.0)) > 0
    return str(caught.value)


@pytest.mark.parametrize(("original", "enabled"), [(True, True), (False, True), (True, False)])
def test_does_not_clip_the_shards_of_fsdp1(two_ranks: Ranks, original: bool, enabled: bool) -> None:
    """Each rank would have another norm; the error names the method that has the right one."""
    for message in two_ranks(clip_flattened, original, enabled):
        assert "model.clip_grad_norm_(max_norm)" in message
