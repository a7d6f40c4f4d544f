"""Accelerate: an ``Accelerator`` that runs a plan, with amphal's scaler in it.

Accelerate takes its scaler from ``torch.amp``, and on a CPU it takes fp16 for full precision
without a word. :func:`adopt` puts the plan's scaler in and autocast on, before anything is
prepared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._front import Plan
from .._scaler import GradScaler
from ..contract import LOW_PRECISION, short_name
from ..errors import ArgumentError, ArgumentTypeError
from ._extra import framework, require_plan, require_scaler

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["accelerator", "adopt", "mixed_precision"]

_OWNERS = ("DEEPSPEED", "MEGATRON_LM")  # distributed types whose engines own mixed precision


def mixed_precision(plan: Plan) -> str:
    """The value of ``Accelerator(mixed_precision=...)``: ``"bf16"``, ``"fp16"`` or ``"no"``."""
    dtype = require_plan(plan, "mixed_precision").dtype
    return short_name(dtype) if dtype in LOW_PRECISION else "no"


def accelerator(plan: Plan, *, scaler: GradScaler | None = None, **arguments: Any) -> Accelerator:
    """An ``Accelerator`` for ``plan``, with amphal's scaler where the plan needs one.

    Args:
        plan: the plan; its device must be the one that Accelerate takes.
        scaler: a scaler of your own settings; None makes one as :func:`adopt` says.
        arguments: what ``Accelerator`` takes besides ``mixed_precision``.

    Raises:
        MissingExtraError: Accelerate is not installed.
        ArgumentError: ``mixed_precision`` among the arguments, or as :func:`adopt` says.
    """
    require_plan(plan, "accelerator")
    if "mixed_precision" in arguments:
        raise ArgumentError(
            "mixed_precision comes from the plan; name another precision in amphal.detect()"
        )
    if plan.device.type == "cpu":
        arguments.setdefault("cpu", True)
    made = framework("accelerate", "accelerate").Accelerator(
        mixed_precision=mixed_precision(plan), **arguments
    )
    return adopt(made, plan, scaler=scaler)


def adopt(accelerator: Any, plan: Plan, *, scaler: GradScaler | None = None) -> Accelerator:
    """Put the plan's scaler and autocast into an ``Accelerator`` that exists; gives it back.

    For one that another library made, such as ``trainer.accelerator`` of transformers. Without
    ``scaler``, one of amphal's that it has already stays; else one is made with the settings of the
    accelerator's ``GradScalerKwargs``, shared by all ranks under FSDP and tensor parallelism. Under
    DeepSpeed and Megatron nothing is changed: their engines own mixed precision.

    Raises:
        ArgumentTypeError: no ``Accelerator``, or no plan.
        ArgumentError: it has another precision or device than the plan, its models were prepared
            already, or a scaler was given to an engine that has its own.
    """
    require_plan(plan, "adopt")
    require_scaler(scaler, "adopt")
    accelerate = framework("accelerate", "accelerate")
    if not isinstance(accelerator, accelerate.Accelerator):
        raise ArgumentTypeError(
            f"adopt() takes an accelerate.Accelerator, got {type(accelerator).__name__}"
        )
    _check(accelerator, plan, scaler)
    if accelerator.distributed_type.name not in _OWNERS:
        accelerator.native_amp = plan.dtype in LOW_PRECISION
        if scaler is None and plan.use_scaler:
            has = accelerator.scaler  # amphal's, from an adoption before
            scaler = has if isinstance(has, GradScaler) else _scaler(accelerator, plan)
        accelerator.scaler = scaler
    return accelerator


def _check(accelerator: Any, plan: Plan, scaler: GradScaler | None) -> None:
    wanted = mixed_precision(plan)
    if accelerator.mixed_precision != wanted:
        raise ArgumentError(
            f"the accelerator has mixed_precision={accelerator.mixed_precision!r}, the plan is for "
            f"{wanted!r}; make it with amphal.integrations.accelerate.mixed_precision(plan)"
        )
    if accelerator.device.type != plan.device.type:
        raise ArgumentError(
            f"Accelerate runs on {accelerator.device}, the plan is for {plan.device}; "
            f"call amphal.detect({accelerator.device.type!r})"
        )
    if accelerator._models or accelerator._optimizers:
        raise ArgumentError(
            "this accelerator has prepared models or optimizers, which hold what it was before; "
            "call adopt() before prepare()"
        )
    if scaler is not None and accelerator.distributed_type.name in _OWNERS:
        raise ArgumentError(
            f"under {accelerator.distributed_type.name} the engine scales the loss itself; "
            "leave the scaler out"
        )


def _scaler(accelerator: Any, plan: Plan) -> GradScaler:
    handler = accelerator.scaler_handler
    settings = handler.to_kwargs() if handler is not None else {}
    parallelism = getattr(accelerator, "parallelism_config", None)
    shards = parallelism is not None and parallelism.non_data_parallel_size > 1
    if shards or accelerator.distributed_type.name == "FSDP":
        settings["process_group"] = torch.distributed.group.WORLD
    return plan.grad_scaler(**settings)
