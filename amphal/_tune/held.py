"""What a step's function holds: the default of ``state=``."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ArgumentError
from .snapshot import Snapshot, attributes_of, holds_state

__all__ = ["held_by", "only_known_optimizers"]

_SAY = "Name what the step changes: state=[model, optimizer, ...]"


def held_by(step: Callable[..., Any]) -> list[object]:
    """The objects with state that ``step`` holds directly, in the order found.

    Directly: in a closure cell, a default argument, an argument of ``functools.partial``, as the
    bound ``self`` or as one of its attributes. Globals and containers are not searched.

    Raises:
        ArgumentError: there is no module among them, or an optimizer of other parameters.
    """
    found = list({id(value): value for value in _held(step) if holds_state(value)}.values())
    known: set[int] = set()
    for value in found:
        if isinstance(value, torch.nn.Module):
            known.update(map(id, value.parameters()))
        elif isinstance(value, torch.nn.Parameter):
            known.add(id(value))
    optimizers = [value for value in found if isinstance(value, torch.optim.Optimizer)]
    if not known and not any(isinstance(value, torch.nn.Module) for value in found):
        raise ArgumentError(
            "tune() does not know what to put back: the step's closure, default arguments, "
            "functools.partial arguments and bound self hold no module (globals are not searched). "
            f"{_SAY}; state=[] if it changes nothing"
        )
    for optimizer in optimizers:
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise ArgumentError(
                f"the step holds an optimizer ({type(optimizer).__name__}) of parameters whose "
                f"module it does not hold, so tune() cannot put that module back. {_SAY}"
            )
    return found


def _held(step: Any) -> Iterator[object]:
    if isinstance(step, functools.partial):
        yield from step.args
        yield from step.keywords.values()
        yield from _held(step.func)
    elif isinstance(step, MethodType):
        yield step.__self__
        yield from attributes_of(step.__self__).values()
        yield from _held(step.__func__)
    elif isinstance(inner := inspect.unwrap(step), FunctionType):  # below decorators
        for cell in inner.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not filled yet
                continue
        yield from inner.__defaults__ or ()
        yield from (inner.__kwdefaults__ or {}).values()
    else:  # an object with __call__
        yield inner
        yield from attributes_of(inner).values()


@contextmanager
def only_known_optimizers(snapshot: Snapshot) -> Iterator[None]:
    """Within the block, an optimizer that ``snapshot`` does not keep raises before it steps.

    A step may reach one that :func:`held_by` does not see, such as a global.
    """
    here = threading.get_ident()

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == here and not snapshot.keeps(optimizer):
            raise ArgumentError(
                f"the step uses an optimizer ({type(optimizer).__name__}) that its function does "
                f"not hold, so tune() would not put it back. {_SAY}"
            )

    hook = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()
