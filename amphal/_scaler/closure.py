"""Steps with a closure: LBFGS, which evaluates many times, and two-pass optimizers such as SAM."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from .._torch import private
from ..errors import ScalerStateError
from . import gradients
from .optimizers import drop_stale_casts, out_of_order
from .outcome import StepOutcome
from .step import Stepper

__all__ = ["fresh_casts", "replaced", "step"]


class _Overflow(BaseException):
    """Leaves an optimizer's step from inside its closure; no ``except Exception`` stops it."""


def fresh_casts(closure: Callable[[], Any]) -> Callable[[], Any]:
    """``closure`` with autocast's casts forgotten first: the optimizer has moved the weights."""

    def evaluate() -> Any:
        drop_stale_casts()
        return closure()

    return evaluate


def replaced(
    closure: Any, by: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an optimizer's step with ``by`` in the place of ``closure``."""
    if args and args[0] is closure:
        return (by, *args[1:]), kwargs
    return args, {**kwargs, "closure": by}


def step(
    scaler: Stepper,
    optimizer: Any,
    closure: Callable[[], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """One decision for all evaluations: step, or skip and put everything back."""
    state = scaler._state_of(optimizer)
    if state.stage is OptState.STEPPED:
        raise out_of_order("step", state)
    evaluate = _Evaluation(scaler, optimizer, closure)
    unscaled = state.stage is OptState.UNSCALED
    if unscaled or evaluate.backward_was_called():
        # A two-pass optimizer starts from gradients that were computed before the step.
        scaler._check_scale_growth_tracker("step")
        if evaluate.found(keep=unscaled):
            return _finish(scaler, optimizer, evaluate, None, skipped=True)
    before = _Snapshot(optimizer)
    args, kwargs = replaced(closure, evaluate, args, kwargs)
    try:
        result = optimizer.step(*args, **kwargs)
    except _Overflow:
        before.restore()
        return _finish(scaler, optimizer, evaluate, None, skipped=True)
    except BaseException:
        before.restore()
        _remember(scaler, optimizer)
        scaler._forget_untouched()
        raise
    return _finish(scaler, optimizer, evaluate, result, skipped=False)


def _finish(
    scaler: Stepper, optimizer: Any, evaluate: _Evaluation, result: Any, *, skipped: bool
) -> Any:
    _remember(scaler, optimizer)
    state = scaler._state_of(optimizer)
    state.stage, state.found = OptState.STEPPED, skipped
    state.calls, state.noted = scaler._scale_calls, scaler._notes_all
    scaler._note(optimizer, None)
    if evaluate.flag is not None:
        state.found_inf_per_device = {evaluate.flag.device: evaluate.flag}
    nothing = evaluate.flag is None
    scaler._finish_step(optimizer, StepOutcome(skipped, nothing_to_do=nothing))
    return result


def _remember(scaler: Stepper, optimizer: Any) -> None:
    """These gradients are spent: the next step must not take them for new ones."""
    grads = [param.grad for param in gradients.params_of(optimizer) if param.grad is not None]
    scaler._spent[optimizer] = [(weakref.ref(grad), grad._version) for grad in grads]


class _Evaluation:
    """The closure as the optimizer sees it: it leaves unscaled gradients that are finite."""

    def __init__(self, scaler: Stepper, optimizer: Any, closure: Callable[[], Any]) -> None:
        self._scaler, self._optimizer, self._closure = scaler, optimizer, fresh_casts(closure)
        self.flag: Tensor | None = None

    def __call__(self) -> Any:
        calls = self._scaler._scale_calls
        loss = self._closure()
        if self._scaler._scale_calls == calls:
            raise ScalerStateError(
                "the closure did not call scaler.scale(): it must call "
                "scaler.scale(loss).backward() and return the loss as it is"
            )
        if self.found():
            raise _Overflow
        return loss

    def backward_was_called(self) -> bool:
        """Whether gradients of this iteration were there before the step.

        Another optimizer's loss may have been scaled in it; then these are an earlier step's.
        """
        if self._scaler._scale_calls == self._scaler._calls_at_update:
            return False
        grads = [p.grad for p in gradients.params_of(self._optimizer) if p.grad is not None]
        spent = {
            id(old()): version for old, version in self._scaler._spent.get(self._optimizer) or []
        }
        return any(spent.get(id(grad)) != grad._version for grad in grads)

    def found(self, *, keep: bool = False) -> bool:
        """Unscale and check the gradients that are there now: one host sync."""
        scaler = self._scaler
        state = scaler._state_of(self._optimizer)
        if not keep:
            state.stage = OptState.READY
            scaler.unscale_(self._optimizer)
        else:
            scaler._take_newcomers(self._optimizer, state)
        flag, _ = scaler._agree([state], None)
        if flag is None:
            return False
        self.flag = flag
        return bool(flag.item())


class _Snapshot:
    """The parameters and the optimizer's state, to be put back."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._params = [
            (param, param.detach().clone())
            for group in optimizer.param_groups
            for param in group["params"]
        ]
        self._state = {key: _copied(value) for key, value in optimizer.state.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for param, value in self._params:
            param.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copied, value))
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value


private.not_as_frames(__name__)
