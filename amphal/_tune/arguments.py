"""The arguments of ``tune()``, and the ranks that measure together."""

from __future__ import annotations

import math
import numbers
from typing import Any

from .._front import Plan
from ..errors import ArgumentError, ArgumentTypeError
from .race import Together, alone

__all__ = ["Together", "common", "seconds", "together_in", "tolerance_of"]


def seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(
            f"{name} must be a number of seconds, got {type(value).__name__} ({value!r})"
        )
    if not 0 < _float(value) < math.inf:
        raise ArgumentError(f"{name} must be more than 0 and finite, got {value!r}")
    return float(value)


def tolerance_of(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(
            f"rtol must be a number, or None to compare nothing, "
            f"got {type(value).__name__} ({value!r})"
        )
    if not 0 <= _float(value) < math.inf:
        raise ArgumentError(f"rtol must be 0 or more and finite, got {value!r}")
    return float(value)


def _float(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def together_in(group: Any) -> Together:
    import torch.distributed as dist

    if group is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ArgumentError(
                f"tune() in a job of {dist.get_world_size()} ranks needs process_group=, or they "
                "would run different numbers of steps and wait for each other. Pass "
                "torch.distributed.group.WORLD on all ranks; a rank that measures alone passes a "
                "group of itself"
            )
        return alone
    from .._choice import require_group

    require_group(group)

    def together(value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values

    return together


def common(plans: dict[str, Plan], together: Together) -> dict[str, Plan]:
    """The candidates that all ranks have."""
    answers = together(list(plans))
    common = {name: plan for name, plan in plans.items() if all(name in a for a in answers)}
    if not common:
        raise ArgumentError(f"the ranks have no candidate in common: {answers}")
    return common
