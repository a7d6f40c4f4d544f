"""What a scaler must know of an optimizer, and of the order of its calls."""

from __future__ import annotations

import inspect
import weakref
from typing import Any, Generic, TypeVar

import torch
from torch.amp.grad_scaler import OptState
from torch.utils.weak import WeakIdKeyDictionary

from .._torch import private
from ..errors import ScalerStateError
from .optimizer_state import OptimizerState

_V = TypeVar("_V")


class ByOptimizer(Generic[_V]):
    """Values by optimizer, compared by identity.

    An optimizer is held weakly. A wrapper that cannot be (``__slots__``) is held until the end.
    """

    def __init__(self) -> None:
        self._weak: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._strong: dict[int, tuple[Any, _V]] = {}

    def __setitem__(self, optimizer: Any, value: _V) -> None:
        try:
            self._weak[optimizer] = value
        except TypeError:
            self._strong[id(optimizer)] = (optimizer, value)

    def optimizers(self) -> list[Any]:
        """The optimizers that still exist."""
        return [*self._weak, *(optimizer for optimizer, _ in self._strong.values())]

    def __len__(self) -> int:
        return len(self._weak) + len(self._strong)

    def get(self, optimizer: Any) -> _V | None:
        """The value, or None."""
        try:
            value: _V | None = self._weak.get(optimizer)  # type: ignore[no-untyped-call]
        except TypeError:
            value = self._strong.get(id(optimizer), (None, None))[1]
        return value


def drop_stale_casts() -> None:
    """Inside a region, forget autocast's casts of the weights: the weights have changed."""
    inside = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    if inside:
        torch.clear_autocast_cache()


def is_fused(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def needs_host(optimizer: Any) -> bool:
    """Whether the host must know the decision before it calls the optimizer's step."""
    if not is_fused(optimizer):
        return True
    for group in optimizer.param_groups:
        if group.get("momentum"):
            # Skipping its first step by itself, torch's fused SGD leaves a momentum buffer of
            # memory that nobody wrote, and steps with it next time (2.6 to 2.14).
            first = next((p for p in group["params"] if p.grad is not None), None)
            if first is not None and optimizer.state.get(first, {}).get("momentum_buffer") is None:
                return True
    return False


_signatures: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _takes_scaler(optimizer: Any) -> bool:
    """torch's older contract: a fused optimizer whose ``step`` takes ``grad_scaler=``."""
    if not is_fused(optimizer):
        return False
    step = getattr(optimizer.step, "__func__", optimizer.step)
    if torch.compiler.is_compiling():  # which does not trace weak keys
        return "grad_scaler" in inspect.signature(step).parameters
    try:
        return _signatures[step]
    except (KeyError, TypeError):
        answer = "grad_scaler" in inspect.signature(optimizer.step).parameters
        try:
            _signatures[step] = answer
        except TypeError:
            pass  # a callable that cannot be referred to weakly: asked again each time
        return answer


def out_of_order(method: str, state: OptimizerState) -> ScalerStateError:
    if state.stage is OptState.STEPPED:
        return ScalerStateError(
            f"{method}() was called after step() of the same optimizer: "
            "call scaler.update() first, which ends the iteration"
        )
    done = (
        "clip_grad_norm_()"
        if state.divisor is not None or state.recheck is not None
        else "unscale_()"
    )
    return ScalerStateError(
        f"{method}() was called after {done}, which has unscaled this optimizer's gradients "
        "already: call it once for all micro-batches together, then scaler.step(optimizer) and "
        "scaler.update()"
    )


private.not_as_frames(__name__)
