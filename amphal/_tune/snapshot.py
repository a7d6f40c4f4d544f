"""A copy of training state, and putting it back bit by bit, in place.

What is torch's or amphal's own (modules, optimizers, schedulers, scalers) is walked through all its
attributes, so that state which a step creates lazily is gone again afterwards. Anything else with
``state_dict`` and ``load_state_dict`` is asked for its state. The random number generators belong
to every copy. Plain objects and containers are put back where tensors lie in them: a cache of keys
and values, or a dict of averages, is again what it was.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from types import ModuleType
from typing import Any

import torch

from .._torch import matmul
from ..errors import ArgumentError, ArgumentTypeError

__all__ = [
    "LONGEST",
    "Snapshot",
    "holds_state",
    "is_librarys",
    "is_plain",
    "is_walked",
]

_TORCHS = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)

LONGEST = 1000
"""Longer containers are data."""
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, set)
_GROUPS = ("types", "argparse")
"""Of the standard library's modules, those whose objects only group what a user puts there."""
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "amphal"}) - {"__main__"}


def is_walked(value: object) -> bool:
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

    def __init__(
        self, owners: Iterable[object], device: torch.device, plain: Iterable[object] = ()
    ) -> None:
        self._undo: list[Callable[[], object]] = []
        self._settings: list[Callable[[], object]] = []
        self._seen: dict[int, object] = {}  # holds the objects too, so that an id stays theirs
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None, int]] = []
        with torch.no_grad():
            for owner in owners:
                if not holds_state(owner):
                    raise ArgumentTypeError(
                        "state must name modules, optimizers, schedulers, scalers, tensors, random "
                        "number generators or other objects with state_dict() and "
                        f"load_state_dict(), got {type(owner).__name__} ({owner!r})"
                    )
                self._keep(owner)
        for value in plain:
            self._keep_plain(value)
        self._keep_generators(device)
        self._keep_settings()

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
        for undo in self._settings:
            undo()
        # Putting a gradient back has written to it, which is no backward pass.
        self._gradients = [
            (tensor, grad, 0 if grad is None else grad._version)
            for tensor, grad, _ in self._gradients
        ]

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
        elif is_walked(value) or type(value).__module__.startswith("amphal."):
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

    def _keep_plain(self, value: Any) -> None:
        """Not its elements: the search for state has found them already."""
        if isinstance(value, MutableMapping):
            put_back = undo_mapping(value)
        elif isinstance(value, (list, deque)):
            put_back = undo_list(value)
        elif isinstance(value, set):
            put_back = undo_set(value)
        else:
            put_back = undo_attributes(value)
        held = holds_tensors(value)

        def undo() -> None:
            if held or holds_tensors(value):
                put_back()

        self._undo.append(undo)

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

    def _keep_settings(self) -> None:
        grad = torch.is_grad_enabled()
        self._settings += [lambda: torch.set_grad_enabled(grad), matmul.keep()]

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


def is_plain(value: object) -> bool:
    """Whether ``value`` is a container or an object that only groups others."""
    if type(value) in _CONTAINERS:
        return len(value) <= LONGEST  # type: ignore[arg-type]
    if isinstance(value, (type, ModuleType, Mapping)) or holds_state(value):
        return False
    kind = type(value)
    return kind.__module__ in _GROUPS or not is_librarys(kind.__module__)


def holds_tensors(value: object, depth: int = 4) -> bool:
    """Whether a tensor lies in a plain value, or in plain ones inside it."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0:
        return False
    inner: Iterable[object] = ()
    if isinstance(value, tuple):
        inner = value[:LONGEST]
    elif isinstance(value, dict) and is_plain(value):
        inner = list(value.values())
    elif is_plain(value):
        inner = list(value) if type(value) in _CONTAINERS else attributes_of(value).values()  # type: ignore[call-overload]
    return any(holds_tensors(one, depth - 1) for one in inner)


def is_librarys(module: str) -> bool:
    """Whether objects of this module's types are not looked into."""
    return module.partition(".")[0] in _LIBRARIES


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
