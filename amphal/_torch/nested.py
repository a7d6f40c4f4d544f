"""Tensors in nested values."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch


def cast(value: Any, devices: tuple[str, ...], dtype: torch.dtype) -> Any:
    """Cast floating-point tensors (float64 aside) that lie on ``devices``, in containers too."""
    if isinstance(value, torch.Tensor):
        eligible = (
            value.is_floating_point()
            and value.dtype is not torch.float64
            and value.device.type in devices
        )
        return value.to(dtype) if eligible else value
    if type(value) is dict:
        return {k: cast(v, devices, dtype) for k, v in value.items()}
    if isinstance(value, dict):
        return _with_items(value, {k: cast(v, devices, dtype) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        items = [cast(v, devices, dtype) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_record(value):
        return _with_fields(value, {k: cast(v, devices, dtype) for k, v in fields_of(value)})
    return value


def is_record(value: Any) -> bool:
    """Whether it is an instance of a dataclass that carries values, and no module."""
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not isinstance(value, torch.nn.Module)
    )


def fields_of(value: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass that are set, and their values."""
    names = [f.name for f in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _with_items(value: Any, items: dict[Any, Any]) -> Any:
    changed = {k: v for k, v in items.items() if v is not value[k]}
    if not changed:
        return value
    new = copy.copy(value)
    for k, v in changed.items():
        new[k] = v
    return new


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    changed = {name: v for name, v in fields.items() if v is not getattr(value, name)}
    if not changed:
        return value
    new = copy.copy(value)
    for name, v in changed.items():
        object.__setattr__(new, name, v)  # a frozen one too
    return new


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among an op's arguments or results, also in lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
