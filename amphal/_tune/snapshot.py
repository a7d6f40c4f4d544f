"""A copy of training state, and putting it back bit by bit, in place.

What is torch's or amphal's own (modules, optimizers, schedulers, scalers) is walked through all its
attributes, so that state which a step creates lazily is gone again afterwards. Anything else with
``state_dict`` and ``load_state_dict`` is asked for its state. The random number generators belong
to every copy. Lists, dicts and sets have their elements again: a dict of averages, or the keys and
values that ``vars(cache)`` names, is what it was.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from types import ModuleType
from typing import Any

import torch

from ..errors import ArgumentError, ArgumentTypeError
from .settings import keep_settings

__all__ = ["Snapshot", "attributes_of", "holds_state"]

_TORCHS = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)

_CONTAINERS = (MutableMapping, list, deque, set)


def _is_walked(value: object) -> bool:
    """Whether all attributes of ``value`` belong to its state."""
    return isinstance(value, _TORCHS)


def _is_numpys(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        value, (numpy.random.Generator, numpy.random.RandomState)
    )


def holds_state(value: object) -> bool:
    """Whether a snapshot can keep ``value``."""
    if isinstance(value, (type, ModuleType)):
        return False
    if isinstance(value, (*_TORCHS, torch.Tensor, torch.Generator, random.Random)):
        return True
    if _is_numpys(value):
        return True
    return _has_method(value, "state_dict") and _has_method(value, "load_state_dict")


def _has_method(value: object, name: str) -> bool:
    # Not by getattr(): the __getattr__ of a proxy may do or raise anything.
    return callable(getattr(type(value), name, None)) or callable(
        getattr(value, "__dict__", {}).get(name)
    )


class Snapshot:
    """The state of some objects and of the generators, at the time of construction."""

    def __init__(self, owners: Iterable[object], device: torch.device) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: dict[int, object] = {}  # holds the objects too, so that an id stays theirs
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None, int]] = []
        with torch.no_grad():
            for owner in owners:
                if not (holds_state(owner) or isinstance(owner, _CONTAINERS)):
                    raise ArgumentTypeError(
                        "state must name modules, optimizers, schedulers, scalers, tensors, random "
                        "number generators, lists, dicts, sets or other objects with state_dict() "
                        "and load_state_dict() (for a plain object, vars(it)), "
                        f"got {type(owner).__name__} ({owner!r})"
                    )
                self._keep(owner)
        self._keep_generators(device)
        self._settings = keep_settings(device)

    def forget(self) -> None:
        """Let go of the copy: the traceback of an error may hold this object for long."""
        self._undo.clear()
        self._seen.clear()
        self._gradients.clear()

    def restore(self) -> None:
        """Put everything back; also when it is interrupted, before the interrupt goes on."""
        try:
            self._restore()
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        with torch.no_grad():
            for undo in self._undo:
                undo()
        self._settings()
        # Putting a gradient back has written to it, which is no backward pass.
        self._gradients = [
            (tensor, grad, 0 if grad is None else grad._version)
            for tensor, grad, _ in self._gradients
        ]

    def keeps(self, value: object) -> bool:
        """Whether ``value`` is part of the copy."""
        return id(value) in self._seen

    def has_optimizer(self) -> bool:
        """Whether an optimizer is among what was kept."""
        return any(isinstance(value, torch.optim.Optimizer) for value in self._seen.values())

    def gradients_changed(self) -> bool:
        """Whether a backward pass has left something since the copy, or since it was put back."""
        return any(
            tensor.grad is not grad or (grad is not None and grad._version != version)
            for tensor, grad, version in self._gradients
        )

    def _keep(self, value: Any) -> None:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type)):
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._keep_tensor(value)
        elif _is_walked(value) or type(value).__module__.startswith("amphal."):
            self._keep_attributes(value)
        elif isinstance(value, MutableMapping):
            self._keep_mapping(value)
        elif isinstance(value, (list, deque)):
            self._keep_list(value)
        elif isinstance(value, set):
            self._undo.append(undo_set(value))
        elif isinstance(value, (tuple, frozenset)):
            for item in value:
                self._keep(item)
        elif isinstance(value, (torch.Generator, random.Random)) or _is_numpys(value):
            self._keep_generator(value)
        elif holds_state(value):
            state = copy.deepcopy(value.state_dict())
            self._undo.append(lambda: value.load_state_dict(copy.deepcopy(state)))

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if torch.nn.parameter.is_lazy(tensor):
            raise ArgumentError(
                "tune() cannot undo the initialisation of a lazy module: call the model once "
                "before, so that its parameters have a shape"
            )
        overlapping = any(
            stride == 0 and size > 1 for stride, size in zip(*_layout(tensor), strict=True)
        )
        if tensor.is_meta or overlapping:  # neither can be written to
            return
        data, values = tensor.detach(), tensor.detach().clone()
        if tensor.is_leaf:
            requires_grad, grad = tensor.requires_grad, tensor.grad
            if requires_grad or grad is not None:
                version = 0 if grad is None else grad._version
                self._gradients.append((tensor, grad, version))
            if grad is not None:
                self._keep(grad)

        def undo() -> None:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                if not _same_place(tensor, data):
                    tensor.data = data
                tensor.copy_(values)
            if tensor.is_leaf:
                if tensor.grad is not grad:
                    tensor.grad = grad
                if tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)

        self._undo.append(undo)

    def _keep_attributes(self, owner: Any) -> None:
        self._undo.append(undo_attributes(owner))
        for value in attributes_of(owner).values():
            self._keep(value)

    def _keep_mapping(self, mapping: MutableMapping[Any, Any]) -> None:
        self._undo.append(undo_mapping(mapping))
        for value in list(mapping.values()):
            self._keep(value)

    def _keep_list(self, values: Any) -> None:
        self._undo.append(undo_list(values))
        for item in list(values):
            self._keep(item)

    def _keep_generator(self, generator: Any) -> None:
        if isinstance(generator, torch.Generator):
            state = generator.get_state()
            self._undo.append(lambda: generator.set_state(state))
        elif isinstance(generator, random.Random):
            drawn = generator.getstate()
            self._undo.append(lambda: generator.setstate(drawn))
        elif hasattr(generator, "bit_generator"):
            bits = copy.deepcopy(generator.bit_generator.state)
            self._undo.append(lambda: setattr(generator.bit_generator, "state", bits))
        else:
            words = generator.get_state()
            self._undo.append(lambda: generator.set_state(words))

    def _keep_generators(self, device: torch.device) -> None:
        """Those that a program draws from without naming one."""
        hosts = torch.get_rng_state()
        self._undo.append(lambda: torch.set_rng_state(hosts))
        module = _device_module(device)
        if module is not None:
            where: tuple[torch.device, ...] = (device,)
            try:
                own = module.get_rng_state(*where)
            except TypeError:  # a device type without indices
                where = ()
                own = module.get_rng_state()
            self._undo.append(lambda: module.set_rng_state(own, *where))
        drawn = random.getstate()
        self._undo.append(lambda: random.setstate(drawn))
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            words = numpy.random.get_state()
            self._undo.append(lambda: numpy.random.set_state(words))


def _layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if tensor.layout is not torch.strided:
        return (), ()
    return tuple(tensor.stride()), tuple(tensor.shape)


def _same_place(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether ``tensor`` still is what it was, but for its values."""
    if (tensor.dtype, tensor.device, tensor.shape) != (data.dtype, data.device, data.shape):
        return False
    try:
        return tensor.data_ptr() == data.data_ptr() and _layout(tensor) == _layout(data)
    except RuntimeError:  # no storage of its own: sparse, or a wrapper
        return True


def _device_module(device: torch.device) -> Any:
    """The module of a device type that has a random number generator of its own."""
    if device.type == torch.get_rng_state().device.type:
        return None  # the host's, which is kept anyway
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        return None
    return module if hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state") else None


def slots_of(owner: object) -> list[str]:
    """The names of the attributes that lie in slots."""
    names: list[str] = []
    for kind in type(owner).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def attributes_of(owner: Any) -> dict[str, Any]:
    """Those of ``__dict__`` and those in slots."""
    slots = {name: getattr(owner, name) for name in slots_of(owner) if hasattr(owner, name)}
    return {**getattr(owner, "__dict__", {}), **slots}


def undo_attributes(owner: Any) -> Callable[[], None]:
    slots = {name: getattr(owner, name) for name in slots_of(owner) if hasattr(owner, name)}
    attributes = getattr(owner, "__dict__", {})
    before = dict(attributes)

    def undo() -> None:
        for name in attributes.keys() - before.keys():
            del attributes[name]
        attributes.update(before)
        for name, value in slots.items():
            object.__setattr__(owner, name, value)

    return undo


def undo_mapping(mapping: MutableMapping[Any, Any]) -> Callable[[], None]:
    items = list(mapping.items())

    def undo() -> None:
        mapping.clear()
        for key, value in items:
            mapping[key] = value

    return undo


def undo_list(values: Any) -> Callable[[], None]:
    items = list(values)

    def undo() -> None:
        values.clear()
        values.extend(items)

    return undo


def undo_set(values: set[Any]) -> Callable[[], None]:
    items = set(values)

    def undo() -> None:
        values.clear()
        values.update(items)

    return undo
