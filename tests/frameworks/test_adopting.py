"""What the integrations do beyond equal losses: refusals, clipping, pickling, checkpoints."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradScalerKwargs
from lightning import LightningModule, Trainer
from lightning.fabric import Fabric
from torch import nn

import amphal
from amphal.errors import ArgumentError, ArgumentTypeError
from amphal.integrations import accelerate, lightning, transformers


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps one state a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def plan_of(precision: str) -> amphal.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        return amphal.detect("cpu", precision=precision)


def parts(fused: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)


def test_accelerate_alone_takes_fp16_on_a_cpu_for_fp32() -> None:
    """Why adopt() is there: Accelerate's own fp16 on a CPU has neither autocast nor a scaler."""
    alone = Accelerator(mixed_precision="fp16", cpu=True)
    assert alone.scaler is None
    with alone.autocast():
        assert not torch.is_autocast_enabled("cpu")
    accelerate.adopt(alone, plan_of("fp16"))
    assert isinstance(alone.scaler, amphal.GradScaler)
    with alone.autocast():
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_enabled("cpu")


def test_accelerate_settings_reach_the_scaler() -> None:
    """The settings of GradScalerKwargs are amphal's scaler's."""
    handler = GradScalerKwargs(init_scale=1024.0, growth_interval=7)
    made = accelerate.accelerator(plan_of("fp16"), kwargs_handlers=[handler])
    assert made.scaler.get_scale() == 1024.0
    assert made.scaler.get_growth_interval() == 7


def test_accelerate_checkpoint_has_the_scaler(tmp_path: Path) -> None:
    """save_state and load_state carry scale and counters."""
    plan = plan_of("fp16")
    first = accelerate.accelerator(plan, scaler=amphal.GradScaler(plan, 128.0))
    model, optimizer = first.prepare(*parts())
    for factor in (1.0, math.inf, 1.0):
        first.backward(model(torch.ones(2, 8)).float().sum() * factor)
        optimizer.step()
        optimizer.zero_grad()
    first.save_state(str(tmp_path))
    state = first.scaler.state_dict()
    assert (state["amphal"]["steps"], state["amphal"]["skipped"]) == (2, 1)

    AcceleratorState._reset_state(reset_partial_state=True)
    second = accelerate.accelerator(plan)
    second.prepare(*parts())
    second.load_state(str(tmp_path))
    assert second.scaler.state_dict() == state


def test_accelerate_refusals() -> None:
    """Another precision, a prepared accelerator and no accelerator are refused, each by name."""
    made = Accelerator(mixed_precision="bf16", cpu=True)
    with pytest.raises(ArgumentError, match="'bf16', the plan is for 'fp16'"):
        accelerate.adopt(made, plan_of("fp16"))
    made.prepare(*parts())
    with pytest.raises(ArgumentError, match="before prepare"):
        accelerate.adopt(made, plan_of("bf16"))
    with pytest.raises(ArgumentTypeError, match="got Linear"):
        accelerate.adopt(nn.Linear(1, 1), plan_of("bf16"))
    with pytest.raises(ArgumentError, match="comes from the plan"):
        accelerate.accelerator(plan_of("bf16"), mixed_precision="no")


def test_training_arguments_of_a_plan() -> None:
    """The plan's fields are set, and those that the user gives win."""
    made = transformers.training_arguments(plan_of("bf16"), output_dir="out", optim="sgd")
    assert (made.bf16, made.fp16, made.use_cpu, str(made.optim.value)) == (True, False, True, "sgd")


@pytest.mark.parametrize("fused", [False, True])
def test_fabric_clips(fused: bool) -> None:
    """fabric.clip_gradients sees unscaled gradients, with a fused optimizer too."""
    plan = plan_of("fp16")
    precision = lightning.fabric_precision(plan, scaler=amphal.GradScaler(plan, 128.0))
    fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)
    model, optimizer = fabric.setup(*parts(fused))
    fabric.backward(model(torch.ones(2, 8)).sum())
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
    assert float(norm) == pytest.approx(math.sqrt(8 * 8 * 4 + 8 * 4), rel=1e-3)
    assert float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])) < 0.51
    optimizer.step()
    assert precision.scaler.steps == 1


class Module(LightningModule):  # type: ignore[misc]
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.model, self.optimizer = parts(fused)
        self.norms: list[float] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        out: torch.Tensor = self.model(batch[0]).float().sum()
        return out

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(grads)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


@pytest.mark.parametrize("fused", [False, True])
def test_trainer_clips(fused: bool) -> None:
    """gradient_clip_val works with amphal's scaler, with a fused optimizer too."""
    plan = plan_of("fp16")
    precision = lightning.trainer_precision(plan, scaler=amphal.GradScaler(plan, 128.0))
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, plugins=precision, logger=False,
        gradient_clip_val=0.5, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    rows = torch.utils.data.TensorDataset(torch.ones(4, 8))
    module = Module(fused)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
    assert module.norms == pytest.approx([0.5, 0.5], rel=1e-2)
    assert precision.scaler.steps == 2


@pytest.mark.parametrize("make", [lightning.fabric_precision, lightning.trainer_precision])
def test_plugins_pickle(make: Any) -> None:
    """A plug-in goes to the processes that Lightning spawns, with its plan and scaler."""
    plugin = make(plan_of("fp16"))
    copy = pickle.loads(pickle.dumps(plugin))
    assert type(copy) is type(plugin)
    assert copy.plan == plugin.plan
    assert copy.scaler.state_dict() == plugin.scaler.state_dict()


def test_full_precision_plugins() -> None:
    """For a float32 plan the plug-in is full precision, with no scaler."""
    plugin = lightning.fabric_precision(plan_of("fp32"))
    assert plugin.precision == "32-true"
    assert plugin.scaler is None
    with plugin.forward_context():
        assert not torch.is_autocast_enabled("cpu")


def test_adopting_again_keeps_the_scaler() -> None:
    """A library that adopts once more doesn't take away the scaler that was given."""
    plan = plan_of("fp16")
    mine = amphal.GradScaler(plan, 8.0)
    made = accelerate.adopt(accelerate.accelerator(plan, scaler=mine), plan)
    assert made.scaler is mine
    other = amphal.GradScaler(plan, 16.0)
    assert accelerate.adopt(made, plan, scaler=other).scaler is other


def test_what_is_no_scaler_or_trainer() -> None:
    """Said where it is given, not where a framework would trip over it."""
    plan = plan_of("fp16")
    wrong: Any = object()
    with pytest.raises(ArgumentTypeError, match="takes scaler="):
        accelerate.accelerator(plan, scaler=wrong)
    for make in (lightning.fabric_precision, lightning.trainer_precision):
        with pytest.raises(ArgumentTypeError, match="takes scaler="):
            make(plan, scaler=wrong)
    with pytest.raises(ArgumentTypeError, match=r"a transformers\.Trainer, got Linear"):
        transformers.adopt(nn.Linear(1, 1), plan)


def test_lightning_on_another_device_than_the_plan() -> None:
    """A region of the plan's device does nothing elsewhere, so the first step says it."""
    precision = lightning.fabric_precision(plan_of("bf16"))
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(ArgumentError, match=r"on meta.*plan is for cpu"):
        precision.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1))
