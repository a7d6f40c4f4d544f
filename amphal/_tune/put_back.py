"""What puts a container, or the attributes of an object, back in place, but not what lies in it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

__all__ = [
    "attributes_of",
    "slots_of",
    "undo_attributes",
    "undo_list",
    "undo_mapping",
    "undo_set",
]


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
