"""A plan's precision for FSDP: what ``fully_shard`` and ``FullyShardedDataParallel`` cast to.

FSDP casts whole modules, parameters and inputs, where autocast casts op by op: faster, and coarser,
since a normalisation or a softmax inside the module computes in the low precision too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from .._front import Plan
from ..contract import LOW_PRECISION
from ..errors import ArgumentError
from ._extra import require_plan

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

__all__ = ["mixed_precision"]


@overload
def mixed_precision(
    plan: Plan, *, fsdp: Literal[2] = 2, **settings: Any
) -> MixedPrecisionPolicy: ...
@overload
def mixed_precision(plan: Plan, *, fsdp: Literal[1], **settings: Any) -> MixedPrecision: ...
def mixed_precision(
    plan: Plan, *, fsdp: int = 2, **settings: Any
) -> MixedPrecisionPolicy | MixedPrecision:
    """The mixed-precision policy of ``plan`` for FSDP2 (``fully_shard``) or FSDP1.

    Parameters are gathered and computed with in ``plan.dtype``; gradients are reduced in float32,
    since a sum over ranks is where scaled fp16 gradients overflow first and bf16 ones lose most.
    For a float32 plan the policy casts nothing.

    Args:
        plan: the plan; across machines of different hardware the one that
            ``amphal.detect(process_group=...)`` agreed on, since every rank must cast alike.
        fsdp: 2 gives a ``MixedPrecisionPolicy``, 1 a ``MixedPrecision``.
        settings: fields of that class to set otherwise, such as ``reduce_dtype=torch.bfloat16``.

    Raises:
        ArgumentTypeError, ArgumentError: no plan, another FSDP, or a field it does not have.
    """
    require_plan(plan, "mixed_precision")
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    policies: dict[int, type[Any]] = {1: MixedPrecision, 2: MixedPrecisionPolicy}
    if fsdp not in policies:
        raise ArgumentError(
            f"fsdp must be 2 (fully_shard) or 1 (FullyShardedDataParallel), got {fsdp!r}"
        )
    policy = policies[fsdp]
    fields = policy.__dataclass_fields__
    unknown = sorted(set(settings) - set(fields))
    if unknown:
        raise ArgumentError(
            f"{policy.__name__} has no field {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(fields)}"
        )
    if plan.dtype in LOW_PRECISION:
        settings = {"param_dtype": plan.dtype, "reduce_dtype": torch.float32, **settings}
    made: MixedPrecision | MixedPrecisionPolicy = policy(**settings)
    return made
