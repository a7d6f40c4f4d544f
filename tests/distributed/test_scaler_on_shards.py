"""What the scaler must do with sharded gradients, in the smallest case of each."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import amphal


def parameter(placement: Placement) -> nn.Parameter:
    """A parameter of four ones spread over the two ranks, with a gradient of the same kind."""
    mesh = init_device_mesh("cpu", (2,))
    made = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [placement]))
    made.grad = distribute_tensor(torch.ones(4), mesh, [placement])
    return made


def step_of(placements: list[Placement], poisoned: int, group: bool) -> tuple[bool, list[Tensor]]:
    """Whether rank 1's inf in the local part of one gradient makes this rank skip; the weights."""
    params = [parameter(placement) for placement in placements]
    scaler = amphal.GradScaler(
        "cpu", 1.0, enabled=True, process_group=dist.group.WORLD if group else None
    )
    scaler.scale(torch.ones(()))
    if dist.get_rank() == 1:
        grad = params[poisoned].grad
        assert isinstance(grad, DTensor)
        grad.to_local()[0] = float("inf")
    opt = torch.optim.SGD(params, lr=0.1)
    scaler.step(opt)
    return scaler.outcome(opt).skipped, [p.detach().full_tensor() for p in params]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("placements", "poisoned", "group"),
    [
        ([Shard(0)], 0, True),
        ([Shard(0)], 0, False),
        ([Shard(0), Replicate()], 0, False),
        ([Replicate(), Shard(0)], 1, True),
        ([Replicate(), Shard(0)], 1, False),
    ],
)
def test_one_rank_has_an_inf(
    two_ranks: Ranks, placements: list[Placement], poisoned: int, group: bool
) -> None:
    """An inf in one rank's shard skips the step on both ranks, wherever the gradient stands."""
    for skipped, weights in two_ranks(step_of, placements, poisoned, group):
        assert skipped
        assert all(torch.equal(weight, torch.ones(4)) for weight in weights)


def clip_mixed() -> float:
    """The norm of a sharded and a plain gradient together."""
    plain = nn.Parameter(torch.ones(4))
    plain.grad = torch.ones(4)
    scaler = amphal.GradScaler("cpu", 1.0, enabled=True)
    scaler.scale(torch.ones(()))
    norm: Tensor = scaler.clip_grad_norm_(
        torch.optim.SGD([parameter(Shard(0)), plain], lr=0.1), 1.0
    )
    return float(norm)


def test_clips_sharded_and_plain_gradients_together(two_ranks: Ranks) -> None:
    """A DTensor beside a plain tensor, as tensor parallelism leaves a norm layer: one norm."""
    assert two_ranks(clip_mixed) == pytest.approx([8**0.5] * 2)
