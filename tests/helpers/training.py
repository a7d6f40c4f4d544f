"""One small training run, in every way that torch distributes one. Imported by the ranks.

Every run sees the same data and has overflows planted at the same steps; what differs is how the
model is spread over the ranks, so all must give what a single process gives.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import amphal
from amphal.integrations import fsdp

BATCH, WIDTH, CLASSES = 8, 16, 4
START = 2.0**10


@dataclass
class Course:
    """What a run came to."""

    losses: list[float] = field(default_factory=list)
    skips: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES)
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: inputs (BATCH, WIDTH), and a target that can be learnt."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x[:, :CLASSES].argmax(1)


def overflows(steps: int, size: int, seed: int = 5) -> dict[int, int]:
    """At which steps there is an overflow, and on which rank."""
    chance = random.Random(seed)
    return {s: chance.randrange(size) for s in range(steps) if chance.random() < 0.15}


def spread(kind: str, plan: amphal.Plan) -> nn.Module:
    """The model as ``kind`` spreads it over the ranks of the default group."""
    net: nn.Module = model()
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "fsdp2":
        mesh = init_device_mesh(plan.device.type, (dist.get_world_size(),))
        policy = fsdp.mixed_precision(plan)
        for layer in (net.get_submodule("1"), net.get_submodule("3")):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(net, mesh=mesh, mp_policy=policy)  # in place
        return net
    if kind == "fsdp1":
        older = fsdp.mixed_precision(plan, fsdp=1)
        return FullyShardedDataParallel(
            net, mixed_precision=older, device_id=plan.device, use_orig_params=True
        )
    if kind == "tensor parallel":
        mesh = init_device_mesh(plan.device.type, (dist.get_world_size(),))
        return parallelize_module(net, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    if kind == "sequence parallel":  # the norm's parameters are DTensors too, replicated ones
        mesh = init_device_mesh(plan.device.type, (dist.get_world_size(),))
        first, second = SequenceParallel(sequence_dim=0), ColwiseParallel(input_layouts=Shard(0))
        return parallelize_module(net, mesh, {"0": first, "1": second, "3": RowwiseParallel()})
    return net


def made(
    kind: str, *, group: bool = False, optimizer: str = "sgd"
) -> tuple[nn.Module, torch.optim.Optimizer, amphal.GradScaler, amphal.Plan]:
    """The spread model, its optimizer, a scaler and the plan: real fp16, on a CPU."""
    with warnings.catch_warnings():  # fp16 is slow on a CPU, and these models are tiny
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        plan = amphal.detect(precision="fp16")
    net = spread(kind, plan)
    shared = dist.group.WORLD if group else None
    # Overflows are planted often: the scale must grow again soon, and not to where real ones are.
    scaler = amphal.GradScaler(
        plan, START, growth_interval=4, max_scale=START, process_group=shared
    )
    return net, make_optimizer(optimizer, net), scaler, plan


def run(
    kind: str,
    size: int,
    steps: int,
    planted: dict[int, int],
    *,
    where: str = "gradient",
    group: bool = False,
    clip: float | None = None,
    optimizer: str = "sgd",
) -> Course:
    """Train ``steps`` steps in real fp16, with overflows in a loss or in one rank's gradient."""
    course, (net, opt, scaler, plan) = Course(), made(kind, group=group, optimizer=optimizer)
    for step in range(steps):
        one_step(kind, size, step, planted, course, net, opt, scaler, plan, where=where, clip=clip)
    course.weights = weights(net)
    course.state = scaler.state_dict()
    return course


def one_step(
    kind: str,
    size: int,
    step: int,
    planted: dict[int, int],
    course: Course,
    net: nn.Module,
    opt: torch.optim.Optimizer,
    scaler: amphal.GradScaler,
    plan: amphal.Plan,
    *,
    where: str,
    clip: float | None = None,
) -> None:
    rank = dist.get_rank() if size > 1 else 0
    x, y = batch(step)
    if kind in ("ddp", "fsdp1", "fsdp2"):  # each rank has its part of the batch
        x, y = x.chunk(size)[rank], y.chunk(size)[rank]
    if kind == "sequence parallel":
        x = x.chunk(size)[rank]
    opt.zero_grad()
    with amphal.autocast(plan):
        loss = F.cross_entropy(net(x).float(), y)
    hit = planted.get(step, -1)
    here = hit == rank or (hit >= 0 and size == 1)
    scaled = scaler.scale(loss)
    (scaled * float("inf") if here and where == "loss" else scaled).backward()
    if here and where == "gradient":
        plant(net)
    if clip is not None:
        course.norms.append(float(scaler.clip_grad_norm_(opt, clip)))
    scaler.step(opt)
    if scaler.outcome(opt).skipped:
        course.skips.append(step)
    scaler.update()
    course.scales.append(scaler.get_scale())
    course.losses.append(mean(loss.detach(), size))


def make_optimizer(name: str, net: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    return torch.optim.AdamW(net.parameters(), lr=1e-2, fused=name == "fused")


def plant(net: nn.Module) -> None:
    """An inf in one element of one gradient of this rank, as a local kernel would leave it."""
    for param in net.parameters():
        if param.grad is not None:
            local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            if local.numel() and (not isinstance(param.grad, DTensor) or sharded(param.grad)):
                local.view(-1)[0] = float("inf")
                return
    raise AssertionError("this rank holds no gradient to plant an overflow in")


def sharded(tensor: DTensor) -> bool:
    return any(placement.is_shard() for placement in tensor.placements)


def mean(loss: Tensor, size: int) -> float:
    total = loss.full_tensor() if isinstance(loss, DTensor) else loss.clone()
    if size > 1:
        dist.all_reduce(total)
    return float(total) / size


def weights(net: nn.Module) -> dict[str, Tensor]:
    """The whole parameters as this rank sees them, by name."""
    if isinstance(net, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(net):
            return {n: p.detach().clone() for n, p in net.named_parameters()}
    whole = {}
    for name, param in net.named_parameters():
        p = param.detach()
        full = p.full_tensor() if isinstance(p, DTensor) else p
        whole[name.removeprefix("module.")] = full.clone()
    return whole
