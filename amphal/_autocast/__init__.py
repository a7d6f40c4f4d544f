"""Autocast regions: made, entered, left, traced by Dynamo and exported.

``autocast.autocast`` is the front; ``region.Region`` sets torch's state and puts it back;
``policy_region`` adds a casting policy; ``arguments`` validates; ``decorator`` and ``export`` serve
decorated functions and export; ``pin.set_precision`` and ``custom_function`` pin modules and
autograd functions; ``engines`` lets an engine that casts itself have its way.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import engines
from .autocast import autocast

if TYPE_CHECKING:
    from .custom_function import custom_bwd, custom_fwd
    from .hold import hold_casts
    from .pin import STORED_MARK, set_precision
    from .region import Region, depth, innermost

# At first use, since ``import amphal`` comes through this door and needs the region alone.
_AT_FIRST_USE = {
    "Region": "region",
    "STORED_MARK": "pin",
    "custom_bwd": "custom_function",
    "custom_fwd": "custom_function",
    "depth": "region",
    "innermost": "region",
    "hold_casts": "hold",
    "set_precision": "pin",
}

__all__ = [
    "STORED_MARK",
    "Region",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "depth",
    "engines",
    "hold_casts",
    "innermost",
    "set_precision",
]


def __getattr__(name: str) -> Any:
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_AT_FIRST_USE[name]}", __name__), name)
