"""Pipeline stages: each rank has other parameters, and all step or skip together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from helpers.training import START, batch, model
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

import amphal

STEPS, MICRO = 30, 2
PLANTED = {3: 0, 11: 1, 20: 0, 21: 1}  # step: the stage whose gradient overflows

pytestmark = pytest.mark.filterwarnings("ignore::amphal.errors.PrecisionWarning")


class Part(nn.Module):
    """Some layers, which run in a region of their own, whoever calls them."""

    def __init__(self, layers: nn.Module, plan: amphal.Plan) -> None:
        super().__init__()
        self.layers, self.plan = layers, plan

    def forward(self, x: Tensor) -> Tensor:
        with amphal.autocast(self.plan):
            out: Tensor = self.layers(x)
        return out.float()  # stages agree on what they send


def train(size: int) -> tuple[list[float], list[int], list[float], dict[str, Tensor]]:
    """Losses (of the last stage), skips, scales and this rank's weights."""
    import warnings

    warnings.simplefilter("ignore", amphal.PrecisionWarning)
    rank = dist.get_rank() if size > 1 else 0
    plan = amphal.detect(precision="fp16")
    net = model()
    part = Part(net if size == 1 else net[:2] if rank == 0 else net[2:], plan)
    opt = torch.optim.SGD(part.parameters(), lr=0.1)
    group = dist.group.WORLD if size > 1 else None
    scaler = amphal.GradScaler(plan, START, process_group=group)

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = scaler.scale(F.cross_entropy(out, y))
        return loss

    if size > 1:
        device = plan.device
        schedule = ScheduleGPipe(PipelineStage(part, rank, size, device), MICRO, loss_fn=loss_fn)
        scaler.scale(torch.zeros((), device=device))  # stages without a loss need the scale too
    losses: list[float] = []
    skips, scales = [], []
    for step in range(STEPS):
        x, y = batch(step)
        opt.zero_grad()
        parts: list[Tensor] = []
        if size == 1:
            for a, b in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True):
                parts.append(loss_fn(part(a), b))
                (parts[-1] / MICRO).backward()
        elif rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=parts)
        if PLANTED.get(step, -1) == rank or (size == 1 and step in PLANTED):
            first = next(p.grad for p in part.parameters() if p.grad is not None)
            first.view(-1)[0] = float("inf")
        if parts:
            losses.append(float(sum(p.detach() for p in parts)) / MICRO / scaler.get_scale())
        scaler.step(opt)
        if scaler.outcome(opt).skipped:
            skips.append(step)
        scaler.update()
        scales.append(scaler.get_scale())
    return losses, skips, scales, {n: p.detach() for n, p in part.named_parameters()}


def test_stages_step_and_skip_together(two_ranks: Ranks) -> None:
    """An overflow in one stage skips on both; losses and weights are those of one process."""
    (none, skips, scales, first), (losses, *others, second) = two_ranks(train, 2)
    single = train(1)
    assert none == []
    assert losses == pytest.approx(single[0], abs=0.01)
    assert [skips, scales] == others == [single[1], single[2]]
    assert skips == sorted(PLANTED)
    together = [*first.values(), *second.values()]
    for ours, theirs in zip(together, single[3].values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.01, rtol=0)
