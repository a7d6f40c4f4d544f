"""Runs of a model on example inputs that leave nothing behind, and what they gave."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .._torch import fields_of, is_record
from ..errors import ArgumentError
from .stored import same_bits

__all__ = ["Mode", "Outcome", "Trial"]

Mode = tuple[bool, str]
"""Whether the training flags are flipped; ``"no grad"``, ``"grad"``, or ``"input grad"`` with
inputs that require gradients."""


class Outcome:
    """What a run gave: its outputs, the gradients of what trains and of inputs, in order."""

    def __init__(self, outputs: list[Any], grads: list[torch.Tensor | None]) -> None:
        self.outputs, self.grads = outputs, grads

    def same(self, other: Outcome) -> bool:
        """Whether every bit is alike."""
        mine, theirs = [*self.outputs, *self.grads], [*other.outputs, *other.grads]
        return len(mine) == len(theirs) and all(map(_same, mine, theirs))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    return type(a) is type(b) and repr(a) == repr(b)  # so that nan is nan, and -0.0 not 0.0


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
        self._arguments, self._call = _arguments(example)
        self._accumulate = False

    @property
    def differentiable(self) -> bool:
        """Whether there is an input that could require a gradient, and does not."""
        return any(_may_require_grad(t) and not t.requires_grad for t in _leaves(self._arguments))

    def run(self, mode: Mode, *watch: Any, region: bool = True) -> Outcome:
        """One run, forward and where something trains backward, from the same state each time."""
        try:
            return self._run(mode, watch, region)
        except RuntimeError as exc:
            # Reentrant checkpoints know backward() alone. It is not the first choice, since hooks
            # on accumulated gradients run in it, which may step an optimizer.
            if self._accumulate or "use_reentrant" not in str(exc):
                raise
        self._accumulate = True
        return self._run(mode, watch, region)

    def _run(self, mode: Mode, watch: tuple[Any, ...], region: bool) -> Outcome:
        flip, grad = mode[0], mode[1] != "no grad"
        where = self.region() if region else contextlib.nullcontext()
        with _unchanged(self.model, self.device), torch.set_grad_enabled(grad):
            if flip:
                for module in self.model.modules():
                    module.training = not module.training
            args, kwargs = _copy(self._arguments, mode[1] == "input grad")
            inputs = [t for t in _leaves((args, kwargs)) if t.requires_grad]
            with where, _all(watch):
                result = self._call(self.model, *args, **kwargs)
                outputs = list(_leaves(result))
            with _all(watch):
                grads = self._grads(outputs, inputs) if grad else []
        if not outputs:
            raise ArgumentError(
                "the model gave no tensors for example_inputs, so nothing can be compared"
            )
        return Outcome([o.detach() for o in outputs] + list(_values(result)), grads)

    def _grads(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        wanted = [*(p for p in self.model.parameters() if p.requires_grad), *inputs]
        roots = [_weighted(o) for o in outputs if o.requires_grad and o.is_floating_point()]
        if not wanted or not roots:
            return []
        if self._accumulate:
            torch.autograd.backward(roots)
            return [t.grad for t in wanted]
        return list(torch.autograd.grad(roots, wanted, allow_unused=True))


def _weighted(output: torch.Tensor) -> torch.Tensor:
    """A sum of which the gradients are not all alike: those of a norm would vanish."""
    if output.layout is not torch.strided:
        return output.float().sum()
    weights = torch.linspace(0.5, 1.5, output.numel(), device=output.device)
    return (output.float() * weights.reshape(output.shape)).sum()


def _all(watch: tuple[Any, ...]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for context in watch:
        stack.enter_context(context)
    return stack


def _arguments(example: Any) -> tuple[tuple[Any, Any], Callable[..., Any]]:
    """The arguments, and what runs the model on them."""

    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    if isinstance(example, torch.Tensor):
        example = (example,)
    if isinstance(example, Mapping):
        return ((), dict(example)), call
    if isinstance(example, (tuple, list)):
        if (
            len(example) == 2
            and isinstance(example[0], (tuple, list))
            and isinstance(example[1], Mapping)
        ):
            args, kwargs = example
            return (tuple(args), dict(kwargs)), call
        return (tuple(example), {}), call
    if callable(example):
        return ((), {}), example
    raise ArgumentError(
        "example_inputs must be a tensor, a tuple of arguments, a dict of keyword arguments, a "
        f"tuple of both, or a function of the model, got {type(example).__name__}"
    )


def _copy(value: Any, requires_grad: bool) -> Any:
    """The same arguments in memory of their own: a model may write into them."""
    if isinstance(value, torch.Tensor):
        require = value.requires_grad or (requires_grad and _may_require_grad(value))
        return value.detach().clone().requires_grad_(require)
    if type(value) is dict:
        return {k: _copy(v, requires_grad) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(v, requires_grad) for v in value)
    return value


def _may_require_grad(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _parts(value: Any) -> Iterator[Any]:
    """The tensors and the other values in nested mappings, sequences and records."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _parts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item)
    elif is_record(value):
        for _, item in fields_of(value):
            yield from _parts(item)
    else:
        yield value


def _values(value: Any) -> Iterator[Any]:
    """What a model gives besides tensors and can be compared."""
    for part in _parts(value):
        if isinstance(part, (bool, int, float, complex, str)):
            yield part
        elif type(part).__module__ == "numpy":
            yield part.tolist()


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    return (part for part in _parts(value) if isinstance(part, torch.Tensor))


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
