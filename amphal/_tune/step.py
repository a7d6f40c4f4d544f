"""The user's step: how it is called, and what its result says."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .._front import Plan
from ..errors import ArgumentTypeError

__all__ = ["Seen", "Step", "compare", "problem_of", "see"]

_HOW = (
    "write step(plan), which enters plan.autocast() itself, step(plan, scaler), which is given a "
    "scaler of its own for each candidate, or step() for inference alone"
)
_SAMPLE = 65536


class Step:
    """The user's callable, with what it takes."""

    def __init__(self, function: Any) -> None:
        if not callable(function) or isinstance(function, type):
            raise ArgumentTypeError(
                f"step must be a function, got {type(function).__name__} ({function!r}); {_HOW}"
            )
        self.function: Callable[..., Any] = function
        self.takes = _arguments(function)
        """How many arguments it is called with: a plan, and a scaler."""
        self._scalers: dict[str, Any] = {}

    def caller(self, name: str, plan: Plan) -> Callable[[], Any]:
        """The step of one candidate, without arguments."""
        function = self.function
        if self.takes == 2:
            scaler = self._scalers.setdefault(name, plan.grad_scaler())
            return lambda: function(plan, scaler)
        if self.takes == 1:
            return lambda: function(plan)

        def region() -> Any:
            with plan.autocast():
                return function()

        return region

    def skips(self, name: str) -> int:
        """How many steps the candidate's scaler has skipped, if tune() made it."""
        scaler = self._scalers.get(name)
        return int(scaler.skipped) if scaler is not None else 0


def _arguments(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return 1
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in places if p.default is p.empty]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(needed) > 2 or keywords:
        names = ", ".join(p.name for p in (*needed, *keywords))
        raise ArgumentTypeError(f"step needs more than a plan and a scaler ({names}); {_HOW}")
    if len(needed) == 2 or (len(places) > 1 and places[1].name == "scaler"):
        return 2
    if places or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 1
    return 0


@dataclass(frozen=True)
class Seen:
    """What a step returned, as numbers that can be compared."""

    values: torch.Tensor
    """On the host in float64: a loss, or a sample of an output."""
    is_loss: bool

    @property
    def loss(self) -> float | None:
        """The loss, if it is one."""
        return float(self.values) if self.is_loss else None


def see(result: Any) -> Seen | None:
    """What can be compared of a step's result; None where it says nothing.

    Raises:
        ArgumentTypeError: the result is neither a number, nor a tensor, nor None.
    """
    if result is None:
        return None
    if isinstance(result, numbers.Real):
        return Seen(torch.tensor(float(result), dtype=torch.float64), True)
    if not isinstance(result, torch.Tensor):
        raise ArgumentTypeError(
            "step must return the loss (a tensor or a number), an output tensor or None, "
            f"got {type(result).__name__}; return outputs.loss, for example"
        )
    if not result.is_floating_point() or result.numel() == 0:
        return None  # tokens, masks: another one may be as good
    flat = result.detach().reshape(-1)
    if flat.numel() > _SAMPLE:
        flat = flat[:: math.ceil(flat.numel() / _SAMPLE)]
    # By way of float32, because not every device has float64.
    values = flat.float().cpu().double()
    return Seen(values.squeeze(), True) if values.numel() == 1 else Seen(values, False)


def problem_of(seen: Seen | None) -> str:
    """Why a result is wrong in itself, or an empty string. Outputs may hold -inf, as masks do."""
    if seen is None or not seen.is_loss or bool(seen.values.isfinite()):
        return ""
    return f"its loss is {seen.loss}"


def compare(own: list[Seen | None], reference: list[Seen | None], rtol: float) -> str:
    """Why the results are too far from the reference's, or an empty string. Pure.

    Losses are held against the largest of the reference's, so that one near 0 is no trap; outputs
    by the norm of their difference, where the reference is finite.
    """
    losses = [abs(r.loss or 0.0) for r in reference if r is not None and r.is_loss]
    for number, (a, r) in enumerate(zip(own, reference, strict=False), start=1):
        if a is None or r is None:
            continue
        if a.values.shape != r.values.shape:
            return f"its result of step {number} has another shape than the reference's"
        finite = r.values.isfinite()
        ours, theirs = a.values[finite], r.values[finite]
        if not bool(ours.isfinite().all()):
            return f"its result of step {number} is not finite"
        size = max(losses) if a.is_loss else float(theirs.norm())
        far = float((ours - theirs).norm())
        if far > rtol * size:
            what = "loss" if a.is_loss else "output"
            off = far / size if size else math.inf
            return f"its {what} of step {number} is {off:.2g} off the reference's (rtol={rtol:g})"
    return ""
