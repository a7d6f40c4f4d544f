"""The candidates of ``tune()``: what they are called, and the plan that each of them is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .._front import Plan
from .._torch import PRECISIONS as MATMULS
from ..contract import LOW_PRECISION, named_precision, short_name
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedPrecisionError, did_you_mean
from .sentences import Measurement, sentences

__all__ = ["by_precision", "name_of", "named_candidates", "reasons", "usual_candidates"]

_TF32 = "tf32"
_NAMES = ("fp32", _TF32, "bf16", "fp16", *(f"fp32:{matmul}" for matmul in MATMULS))
_ORDER = ("fp32:highest", "fp32", _TF32, "fp32:high", "fp32:medium", "bf16", "fp16")
"""The most precise first; bf16 before fp16, because nothing overflows in it."""


def name_of(plan: Plan, matmuls: Mapping[str, str]) -> str:
    """What a plan is called among candidates; ``matmuls`` is what the backend declares."""
    if plan.matmul_precision == "high" and plan.dtype is torch.float32 and "high" in matmuls:
        return _TF32
    suffix = f":{plan.matmul_precision}" if plan.matmul_precision else ""
    return short_name(plan.dtype) + suffix


def by_precision(names: Iterable[str]) -> list[str]:
    """The names, the most precise first; those that only a user's plans have come last."""
    return sorted(names, key=lambda n: _ORDER.index(n) if n in _ORDER else len(_ORDER))


def usual_candidates(
    base: Plan, matmuls: Mapping[str, str], now: str | None, can_scale: bool
) -> dict[str, Plan]:
    """All that the hardware of ``base`` can do, natively or not.

    Args:
        matmuls: the float32 matmul precisions that make a difference here.
        now: the one that is set already, which ``"fp32"`` runs under. None: it cannot be set.
    """
    plans = [_plan(base, torch.float32, None, can_scale)]
    plans += [
        _plan(base, torch.float32, matmul, can_scale)
        for matmul in matmuls
        if now is not None and matmul != now
    ]
    plans += [
        _plan(base, dtype, None, can_scale)
        for dtype in LOW_PRECISION
        if base.support[dtype].level != "absent"
    ]
    return {name_of(plan, matmuls): plan for plan in plans}


def named_candidates(
    given: object, base: Plan, matmuls: Mapping[str, str], can_scale: bool
) -> dict[str, Plan]:
    """The candidates that the user names: names, torch dtypes, and whole plans.

    Raises:
        ArgumentError, ArgumentTypeError: no candidate, the same one twice, or none of these.
        UnsupportedPrecisionError: the hardware cannot do it.
    """
    if isinstance(given, (str, torch.dtype, Plan)) or not isinstance(given, Iterable):
        raise ArgumentTypeError(
            f"candidates must be a list of names ({', '.join(_NAMES)}), torch dtypes or plans, or "
            f"None for all that the hardware can do, got {type(given).__name__} ({given!r})"
        )
    found: dict[str, Plan] = {}
    for item in given:
        plan = _named(item, base, matmuls, can_scale)
        name = name_of(plan, matmuls)
        if name in found:
            raise ArgumentError(f"candidates: {name!r} is named twice; name each of them once")
        found[name] = plan
    if not found:
        raise ArgumentError(f"candidates is empty; name one or more of: {', '.join(_NAMES)}")
    return found


def _named(item: Any, base: Plan, matmuls: Mapping[str, str], can_scale: bool) -> Plan:
    if isinstance(item, Plan):
        if item.device != base.device:
            raise ArgumentError(
                f"candidates: a plan for {item.device} cannot be compared on {base.device}; "
                "candidates run on one device, which device= names"
            )
        if item.hardware != base.hardware:
            raise ArgumentError(
                f"candidates: a plan for {item.hardware.name} cannot be measured on "
                f"{base.hardware.name}; name its precision, {short_name(item.dtype)!r}, instead"
            )
        return item
    if isinstance(item, torch.dtype):
        return _plan(base, named_precision(item, "candidates"), None, can_scale)
    if not isinstance(item, str):
        raise ArgumentTypeError(
            f"candidates: each must be a name, a torch dtype or an amphal.Plan, "
            f"got {type(item).__name__} ({item!r})"
        )
    name = item.lower()
    if name not in _NAMES:
        raise ArgumentError(
            f"candidates: {item!r} is none of {', '.join(_NAMES)}.{did_you_mean(name, _NAMES)}"
        )
    if name == _TF32:
        if "high" not in matmuls:
            raise UnsupportedPrecisionError(
                f"candidates: {base.hardware.name} ({base.device}) has no TF32; "
                "name 'fp32:high' to set torch's float32 matmul precision all the same"
            )
        name = "fp32:high"
    precision, _, matmul = name.partition(":")
    return _plan(base, named_precision(precision), matmul or None, can_scale)


def _plan(base: Plan, dtype: torch.dtype, matmul: str | None, can_scale: bool) -> Plan:
    support = base.support[dtype]
    if support.level == "absent":
        raise UnsupportedPrecisionError(
            f"candidates: {base.hardware.name} ({base.device}) cannot do {short_name(dtype)}: "
            f"{support.why}"
        )
    # Not through detect(), which would warn of what is slow: that is to be measured.
    return replace(
        base,
        dtype=dtype,
        use_scaler=dtype is torch.float16 and can_scale,
        matmul_precision=matmul,
        reasons=(*base.reasons[:1], f"a candidate of amphal.tune(): {support.why}"),
        measured=None,
    )


def reasons(
    plan: Plan, unmeasured: Plan, rows: Sequence[Measurement], chosen: str, source: str
) -> tuple[str, ...]:
    """Why the measured plan is what it is."""
    guess = short_name(unmeasured.dtype)
    ratio = next(row.ratio for row in rows if row.candidate == chosen)
    how = "the fastest here" if ratio == 1 else "as fast as the fastest here"
    return (
        *plan.reasons[:1],
        f"chose {chosen}, {how}{f' ({source})' if source else ''}",
        *sentences(rows, chosen),
        f"unmeasured, amphal.detect() would choose {guess}",
    )
