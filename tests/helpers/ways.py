"""The same twenty steps under raw torch.amp, amphal, and each framework with amphal in it.

Each way takes the name of a model and a plan, and gives the losses of its steps and its scaler.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import amphal
from amphal.integrations import accelerate as amphal_accelerate
from amphal.integrations import deepspeed as amphal_deepspeed
from amphal.integrations import lightning as amphal_lightning
from amphal.integrations import transformers as amphal_transformers
from helpers.models import BATCH, MODELS, collate, made, optimizer_of

Result = tuple[list[float], Any]
Way = Callable[[str, amphal.Plan], Result]


def by_hand(name: str, region: Callable[[], torch.autocast], scaler: Any) -> Result:
    model, optimizer, data = made(name)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        with region():
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, scaler


def raw_torch(name: str, plan: amphal.Plan) -> Result:
    scaler = torch.amp.GradScaler("cpu", enabled=plan.dtype is torch.float16)
    low = plan.dtype is not torch.float32
    dtype = plan.dtype if low else torch.bfloat16
    return by_hand(name, lambda: torch.autocast("cpu", dtype=dtype, enabled=low), scaler)


def with_amphal(name: str, plan: amphal.Plan) -> Result:
    return by_hand(name, lambda: amphal.autocast(plan), amphal.GradScaler(plan))


def by_framework(framework: Any, model: Any, optimizer: Any, data: list[Any]) -> list[float]:
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = model(**batch).loss
        framework.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_accelerate(name: str, plan: amphal.Plan) -> Result:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = amphal_accelerate.accelerator(plan)
    model, optimizer, data = made(name)
    model, optimizer = accelerator.prepare(model, optimizer)
    return by_framework(accelerator, model, optimizer, data), accelerator.scaler


def with_fabric(name: str, plan: amphal.Plan) -> Result:
    from lightning.fabric import Fabric

    precision = amphal_lightning.fabric_precision(plan)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)
    model, optimizer, data = made(name)
    model, optimizer = fabric.setup(model, optimizer)
    return by_framework(fabric, model, optimizer, data), precision.scaler


def with_lightning(name: str, plan: amphal.Plan) -> Result:
    import lightning as L

    losses: list[float] = []

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, _, _ = made(name)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    precision = amphal_lightning.trainer_precision(plan)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        plugins=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = MODELS[name][1]()
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=BATCH, collate_fn=collate)  # type: ignore[arg-type]
    trainer.fit(Module(), loader)
    return losses, precision.scaler


def with_trainer(name: str, plan: amphal.Plan) -> Result:
    from accelerate.state import AcceleratorState
    from transformers import Trainer

    AcceleratorState._reset_state(reset_partial_state=True)
    losses: list[float] = []

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kw: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kw)
            losses.append(loss.item())
            return loss

    arguments = amphal_transformers.training_arguments(
        plan,
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        max_grad_norm=0.0,
        logging_strategy="no",
        lr_scheduler_type="constant",
    )
    model, optimizer, _ = made(name)
    trainer = InOrder(
        model,
        arguments,
        train_dataset=MODELS[name][1](),
        data_collator=collate,
        optimizers=(optimizer, None),
    )
    trainer.model_accepts_loss_kwargs = False  # or GPT-2's loss is divided by the first token too
    amphal_transformers.adopt(trainer, plan)
    trainer.train()
    return losses, trainer.accelerator.scaler


def with_deepspeed(name: str, plan: amphal.Plan, by: Any = "autocast", zero: int = 0) -> Result:
    """Runs in a process that is a rank of a group. DeepSpeed steps for itself, so no scaler."""
    import deepspeed

    # Without this DeepSpeed compiles a collective for shared memory first; gloo has all we need.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model, optimizer, data = made(name)
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": zero},
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = amphal_deepspeed.initialize(
        plan, config=settings, by=by, model=model, optimizer=optimizer
    )
    losses = []
    for batch in data:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, None
