"""What a step changes: the stateful objects that its function can reach.

Looked at are closure cells, defaults, a bound ``self``, ``functools.partial`` arguments, the
globals that the code names (also those of the user's modules), the functions among all these, and
the attributes and methods of plain objects.
Plain objects and containers are searched, never restored.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ._snapshot import holds_state

__all__ = ["reachable_state"]

_DEEPEST = 8
_LONGEST = 1000
"""Longer containers are data."""
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", str(__package__)}) - {
    "__main__"
}


def reachable_state(step: Callable[..., Any]) -> list[object]:
    """The objects with state that ``step`` can reach, in the order found."""
    found: list[object] = []
    seen: dict[int, object] = {}

    def look(value: object, depth: int) -> None:
        if id(value) in seen or depth > _DEEPEST or isinstance(value, (type, ModuleType)):
            return
        seen[id(value)] = value
        if holds_state(value):
            found.append(value)
            return
        for inner in _inside(value):
            look(inner, depth + 1)

    look(step, 0)
    return found


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield value.func
        yield from value.args
        yield from value.keywords.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        if len(value) <= _LONGEST:
            yield from list(value)
    elif isinstance(value, Mapping):
        if len(value) <= _LONGEST:
            yield from list(value.values())
    elif not _is_librarys(type(value).__module__):
        yield from list(getattr(value, "__dict__", {}).values())
        for kind in type(value).__mro__:
            if not _is_librarys(kind.__module__):
                yield from (m for m in vars(kind).values() if isinstance(m, FunctionType))


def _of_function(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield getattr(function, "__wrapped__", None)
    space = function.__globals__
    if not _is_librarys(str(space.get("__name__"))):
        names = set(_names(function.__code__))
        for name in sorted(names & space.keys()):
            if isinstance(space[name], ModuleType):
                yield from _of_module(space[name], names)
            else:
                yield space[name]


def _of_module(module: ModuleType, names: set[str]) -> Iterator[object]:
    """What code that names the module may mean of it."""
    if not _is_librarys(module.__name__):
        yield from (vars(module)[name] for name in sorted(names & vars(module).keys()))


def _names(code: CodeType) -> Iterator[str]:
    """The names that the code and the functions inside it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_librarys(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
