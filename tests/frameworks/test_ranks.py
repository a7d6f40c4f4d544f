"""Two ranks in Accelerate and Lightning: one decision, checkpoints, and a scaler that moves."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from lightning import LightningModule, Trainer
from lightning.fabric import Fabric
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

import amphal
from amphal.integrations import accelerate, lightning


def plan_of(precision: str) -> amphal.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        return amphal.detect("cpu", precision=precision)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def halves(net: nn.Module, mesh: Any) -> nn.Module:
    """The first layer spread over the ranks, the last one plain in each."""
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module
    from torch.distributed.tensor.placement_types import Replicate

    plan: dict[str, ParallelStyle] = {
        "0": ColwiseParallel(output_layouts=Replicate(), use_local_output=True)
    }
    return parallelize_module(net, mesh["tensor_parallel"], plan)


def fabric_loop() -> tuple[list[float], int, list[float]]:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import ModelParallelStrategy

    os.environ.update(GROUP_RANK="0", LOCAL_WORLD_SIZE="2")  # as torchrun sets them
    strategy = ModelParallelStrategy(parallelize_fn=halves)
    precision = lightning.fabric_precision(plan_of("fp16"))
    plugins = [precision, TorchElasticEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugins)
    fabric.launch()
    net = fabric.setup(model())
    opt = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))
    scales = []
    for step in range(3):
        fabric.backward(net(torch.ones(2, 8)).float().square().mean())
        if step == 1 and dist.get_rank() == 1:
            net.module[2].weight.grad[0] = math.inf
        opt.step()
        opt.zero_grad()
        scales.append(precision.scaler.get_scale())
    weights = [float(p.detach().sum()) for p in net.module[2].parameters()]
    return scales, precision.scaler.skipped, weights


def test_fabric_with_sharded_parameters_decides_together(two_ranks: Ranks) -> None:
    """An inf in one rank's plain gradient, beside sharded ones, skips the step on both."""
    here, there = two_ranks(fabric_loop)
    assert here == there
    assert here[:2] == ([65536.0, 32768.0, 32768.0], 1)


def accelerate_group(tensor_parallel: bool) -> bool:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # asked for, and not used
    made = Accelerator(mixed_precision="fp16", cpu=True)
    if tensor_parallel:
        made.state.parallelism_config = ParallelismConfig(tp_size=2)  # taken on GPUs only
    accelerate.adopt(made, plan_of("fp16"))
    return made.scaler.process_group is dist.group.WORLD


@pytest.mark.parametrize("tensor_parallel", [True, False])
def test_accelerate_shares_the_scaler_of_shards(two_ranks: Ranks, tensor_parallel: bool) -> None:
    """Under tensor parallelism the ranks need one decision; under DDP they have it already."""
    assert two_ranks(accelerate_group, tensor_parallel) == [tensor_parallel] * 2


class Module(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        out: torch.Tensor = self.layer(batch[0]).float().mean()
        return out

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fit(precision: Any, saved: Path | None = None) -> Trainer:
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, plugins=precision, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rows = torch.utils.data.TensorDataset(torch.ones(4, 8))
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    trainer.fit(Module(), loader, ckpt_path=saved, weights_only=False)
    return trainer


def lightnings_own(scale: float) -> Any:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", scale))


def amphals(scale: float) -> Any:
    plan = plan_of("fp16")
    return lightning.trainer_precision(plan, scaler=amphal.GradScaler(plan, scale))


@pytest.mark.parametrize(
    ("before", "after"),
    [(lightnings_own, amphals), (amphals, lightnings_own), (amphals, amphals)],
)
def test_trainer_checkpoints_keep_the_scale(tmp_path: Path, before: Any, after: Any) -> None:
    """A run goes on with its scale, whichever of the two plug-ins wrote the checkpoint."""
    fit(before(64.0)).save_checkpoint(tmp_path / "saved")
    plugin = after(1024.0)
    fit(plugin, tmp_path / "saved")
    assert plugin.scaler.get_scale() == 64.0
