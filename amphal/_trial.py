"""Runs of a model on example inputs that leave nothing behind, and what they gave."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ._custom_function import fields_of, is_record
from ._precast_state import same_bits
from .errors import ArgumentError

__all__ = ["Mode", "Outcome", "Trial"]

Mode = tuple[bool, bool]
"""Whether the training flags are flipped, and whether gradients are on."""


class Outcome:
    """What a run gave: its outputs and the gradients of what trains, in order."""

    def __init__(self, outputs: list[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
        self.outputs, self.grads = outputs, grads

    def same(self, other: Outcome) -> bool:
        """Whether every bit is alike."""
        mine, theirs = [*self.outputs, *self.grads], [*other.outputs, *other.grads]
        return len(mine) == len(theirs) and all(
            a is b if a is None or b is None else same_bits(a, b)
            for a, b in zip(mine, theirs, strict=True)
        )


class Trial:
    """A model and the inputs to try it on.

    Args:
        example: a tensor, a tuple or list of arguments, a mapping of keyword arguments, a tuple of
            both, or a function that takes the model and runs it.
        region: gives the region to run in.
    """

    def __init__(
        self, model: nn.Module, example: Any, device: torch.device, region: Callable[[], Any]
    ) -> None:
        self.model, self.device, self.region = model, device, region
        self._call = _caller(example)

    def run(self, mode: Mode, *watch: Any, region: bool = True) -> Outcome:
        """One run, forward and where something trains backward, from the same state each time."""
        flip, grad = mode
        where = self.region() if region else contextlib.nullcontext()
        with _unchanged(self.model, self.device), torch.set_grad_enabled(grad):
            if flip:
                for module in self.model.modules():
                    module.training = not module.training
            with where, _all(watch):
                outputs = list(_leaves(self._call(self.model)))
            with _all(watch):
                grads = self._grads(outputs) if grad else []
        if not outputs:
            raise ArgumentError(
                "the model gave no tensors for example_inputs, so nothing can be compared"
            )
        return Outcome([o.detach() for o in outputs], grads)

    def _grads(self, outputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        roots = [o.float().sum() for o in outputs if o.requires_grad and o.is_floating_point()]
        if not trained or not roots:
            return []
        return list(torch.autograd.grad(roots, trained, allow_unused=True))


def _all(watch: tuple[Any, ...]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for context in watch:
        stack.enter_context(context)
    return stack


def _caller(example: Any) -> Callable[[nn.Module], Any]:
    if isinstance(example, torch.Tensor):
        example = (example,)
    if isinstance(example, Mapping):
        return lambda model: model(**_copy(dict(example)))
    if isinstance(example, (tuple, list)):
        if (
            len(example) == 2
            and isinstance(example[0], (tuple, list))
            and isinstance(example[1], Mapping)
        ):
            args, kwargs = example
            return lambda model: model(*_copy(list(args)), **_copy(dict(kwargs)))
        return lambda model: model(*_copy(list(example)))
    if callable(example):
        return lambda model: example(model)
    raise ArgumentError(
        "example_inputs must be a tensor, a tuple of arguments, a dict of keyword arguments, a "
        f"tuple of both, or a function of the model, got {type(example).__name__}"
    )


def _copy(value: Any) -> Any:
    """The same arguments in memory of their own: a model may write into them."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {k: _copy(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(v) for v in value)
    return value


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif is_record(value):
        for _, item in fields_of(value):
            yield from _leaves(item)


@contextlib.contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back buffers, gradients, training flags and the states of random generators."""
    training = [(m, m.training) for m in model.modules()]
    grads = [(p, p.grad) for p in model.parameters()]
    buffers = [
        (m, name, b, b.detach().clone())
        for m in model.modules()
        for name, b in m.named_buffers(recurse=False)
    ]
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy is not None else None
    for param, _ in grads:
        param.grad = None
    module = torch.get_device_module(device)
    devices = []
    if hasattr(module, "get_rng_state") and hasattr(module, "current_device"):
        devices = [device.index if device.index is not None else module.current_device()]
    try:
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        for param, grad in grads:
            param.grad = grad
        for m, flag in training:
            m.training = flag
        with torch.no_grad():
            for m, name, buffer, value in buffers:
                if not same_bits(buffer, value):
                    buffer.copy_(value)
                if getattr(m, name, None) is not buffer:
                    setattr(m, name, buffer)
