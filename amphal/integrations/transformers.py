"""transformers: the fields of ``TrainingArguments`` that a plan decides.

The Trainer runs on Accelerate. :func:`adopt` puts amphal's scaler into it, and fp16 on a CPU at
all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._front import Plan
from ..errors import ArgumentTypeError
from ._extra import framework, require_plan

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

__all__ = ["adopt", "fields", "training_arguments"]


def fields(plan: Plan) -> dict[str, Any]:
    """``bf16``, ``fp16``, ``use_cpu`` and ``optim``, for ``TrainingArguments(**fields(plan))``."""
    require_plan(plan, "fields")
    return {
        "bf16": plan.dtype is torch.bfloat16,
        "fp16": plan.dtype is torch.float16,
        "use_cpu": plan.device.type == "cpu",
        "optim": "adamw_torch_fused" if plan.fused_optimizers else "adamw_torch",
    }


def training_arguments(plan: Plan, **arguments: Any) -> TrainingArguments:
    """``TrainingArguments`` with the plan's fields; yours win.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    chosen = fields(plan)
    transformers = framework("transformers", "transformers")
    made: TrainingArguments = transformers.TrainingArguments(**{**chosen, **arguments})
    return made


def adopt(trainer: Any, plan: Plan, *, scaler: Any = None) -> Trainer:
    """Put the plan's scaler and autocast into a ``Trainer``, before ``train()``; gives it back.

    Raises :class:`ArgumentTypeError` for what is no ``Trainer``, and as
    :func:`amphal.integrations.accelerate.adopt`.
    """
    from . import accelerate

    require_plan(plan, "adopt")
    expected = framework("transformers", "transformers").Trainer
    if not isinstance(trainer, expected):
        raise ArgumentTypeError(
            f"adopt() takes a transformers.Trainer, got {type(trainer).__name__}"
        )
    accelerate.adopt(trainer.accelerator, plan, scaler=scaler)
    made: Trainer = trainer
    return made
