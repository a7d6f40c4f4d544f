"""What a step changes: the stateful objects that its function can reach.

Looked at are closure cells, defaults, a bound ``self``, ``functools.partial`` arguments, the
globals that the code names (also those of the user's modules and classes), the functions among all
these, and the attributes and methods of plain objects, modules and objects with a state.
Plain objects and containers are told apart: a snapshot keeps them where they hold tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from .snapshot import LONGEST, holds_state, is_librarys, is_plain, is_walked, slots_of

__all__ = ["reachable", "reachable_state"]

_DEEPEST = 8
_OF_LOADERS = ("generator", "sampler", "batch_sampler")
"""What draws random numbers in torch's loaders; their data is no state."""


def reachable_state(step: Callable[..., Any]) -> list[object]:
    """The objects with state that ``step`` can reach, in the order found."""
    return reachable(step)[0]


def reachable(step: Callable[..., Any]) -> tuple[list[object], list[object]]:
    """The objects with state that ``step`` can reach, and the plain ones, in the order found."""
    found: list[object] = []
    plain: list[object] = []
    seen: dict[int, object] = {}

    def look(value: object, depth: int) -> None:
        if id(value) in seen or depth > _DEEPEST or isinstance(value, ModuleType):
            return
        seen[id(value)] = value
        if holds_state(value):
            found.append(value)
        elif is_plain(value):
            plain.append(value)
        for inner in _inside(value):
            look(inner, depth + 1)

    look(step, 0)
    return found, plain


def _inside(value: object) -> Iterator[object]:
    module = type(value).__module__
    if isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield value.func
        yield from value.args
        yield from value.keywords.values()
    elif isinstance(value, torch.nn.Module):
        for one in value.modules():
            # The rest is walked as the module's own state.
            yield from [v for name, v in vars(one).items() if not name.startswith("_")]
    elif is_walked(value) or isinstance(value, torch.Tensor):
        return
    elif isinstance(value, (list, tuple, set, frozenset)):
        if len(value) <= LONGEST:
            yield from list(value)
    elif isinstance(value, Mapping):
        if len(value) <= LONGEST:
            yield from list(value.values())
    elif isinstance(value, type):
        yield from _of_class(value, None)
    elif module == "functools":  # a cached function
        yield getattr(value, "__wrapped__", None)
    elif module.startswith("torch.utils.data."):
        yield from (getattr(value, "__dict__", {}).get(name) for name in _OF_LOADERS)
    elif is_plain(value) or not is_librarys(module):
        yield from list(getattr(value, "__dict__", {}).values())
        yield from (getattr(value, name, None) for name in slots_of(value))
        yield from _of_class(type(value), None)


def _of_function(function: FunctionType) -> Iterator[object]:
    space = function.__globals__
    users = not is_librarys(str(space.get("__name__")))
    names = set(_names(function.__code__)) if users else set()
    for cell in function.__closure__ or ():
        try:
            yield from _named_of(cell.cell_contents, names)
        except ValueError:  # not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield getattr(function, "__wrapped__", None)
    for name in sorted(names & space.keys()):
        yield from _named_of(space[name], names)


def _named_of(value: object, names: set[str]) -> Iterator[object]:
    """The value; of a module or a class, what code that names it may mean."""
    if isinstance(value, ModuleType):
        if not is_librarys(value.__name__):
            yield from (vars(value)[name] for name in sorted(names & vars(value).keys()))
    elif isinstance(value, type):
        yield from _of_class(value, names)
    else:
        yield value


def _of_class(owner: type, names: set[str] | None) -> Iterator[object]:
    """The attributes of the user's classes, with the functions of their methods."""
    for kind in owner.__mro__:
        if not is_librarys(kind.__module__):
            for name, value in list(vars(kind).items()):
                if names is None or name in names:
                    yield _function_of(value)


def _function_of(value: object) -> object:
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value.func if isinstance(value, functools.cached_property) else value


def _names(code: CodeType) -> Iterator[str]:
    """The names that the code and the functions inside it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
