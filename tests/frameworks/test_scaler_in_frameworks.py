"""Accelerate and Lightning run their own fp16 loops with this package's scaler.

Not in the default test paths: these need the frameworks, and fail without them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision as TrainerPrecision

import amphal

BATCHES = [1.0, 1.0, math.inf, 1.0, math.nan, 1.0, 1.0, 1.0]


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def batches() -> Any:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, generator=generator) * factor for factor in BATCHES]


def scalers() -> Any:
    """This package's, and torch's to compare with."""
    numbers: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 3}
    return [
        amphal.GradScaler("cpu", enabled=True, **numbers),
        torch.amp.GradScaler("cpu", **numbers),
    ]


def assert_same(runs: Any) -> None:
    (ours, scale), (torchs, expected) = runs
    assert scale == expected
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))
    assert all(p.isfinite().all() for p in ours)


def accelerate_loop(scaler: Any, fused: Any, directory: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16")
    # On a CPU Accelerate makes no scaler of its own; its loop is the same with one.
    accelerator.scaler, accelerator.native_amp = scaler, True
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    skipped = []
    for number, x in enumerate(batches()):
        with accelerator.accumulate(net):
            loss = net(x).square().mean()
            accelerator.backward(loss)
            if not fused:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            scheduler.step()
            optimizer.zero_grad()
        if number == 3:
            accelerator.save_state(str(directory))
            accelerator.load_state(str(directory))
    return [p.detach().clone() for p in net.parameters()], scaler.get_scale(), skipped


@pytest.mark.parametrize("fused", [False, True])
def test_accelerate_runs_its_fp16_loop(fused: Any, tmp_path: Path) -> None:
    """Backward, accumulation, clipping, skipping, schedule, checkpoint: as with torch's."""
    runs = [
        accelerate_loop(scaler, fused, tmp_path / str(number))
        for number, scaler in enumerate(scalers())
    ]
    assert runs[0][2] == runs[1][2]
    if not fused:  # fused, Accelerate cannot see it: the optimizer's step is always called
        assert runs[0][2] == [not math.isfinite(factor) for factor in BATCHES]
    assert_same([run[:2] for run in runs])


def fabric_loop(scaler: Any, fused: Any) -> Any:
    precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[precision])
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
    net, optimizer = fabric.setup(net, optimizer)
    for x in batches():
        optimizer.zero_grad()
        fabric.backward(net(x).square().mean())
        if not fused:
            fabric.clip_gradients(net, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
    precision.load_state_dict(precision.state_dict())
    return [p.detach().clone() for p in net.parameters()], scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
def test_lightning_fabric_runs_its_fp16_loop(fused: Any) -> None:
    """Backward, clipping, step and state through Fabric's plugin: the same as with torch's."""
    assert_same([fabric_loop(scaler, fused) for scaler in scalers()])


class Module(LightningModule):  # type: ignore[misc]
    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.net, self.fused = model(), fused

    def training_step(self, batch: Any, index: Any) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01, fused=self.fused)


def trainer_loop(scaler: Any, fused: Any, directory: Any) -> Any:
    module = Module(fused)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=directory,
        plugins=[TrainerPrecision("16-mixed", device="cpu", scaler=scaler)],
        gradient_clip_val=None if fused else 1.0,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    return [p.detach().clone() for p in module.parameters()], scaler.get_scale()


@pytest.mark.filterwarnings("ignore:.*num_workers.*")
@pytest.mark.parametrize("fused", [False, True])
def test_the_lightning_trainer_runs_its_fp16_loop(fused: Any, tmp_path: Path) -> None:
    """Closure, unscale, clipping, step and checkpoint through the Trainer: as with torch's."""
    assert_same([trainer_loop(scaler, fused, tmp_path) for scaler in scalers()])
