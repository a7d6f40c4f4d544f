"""The two environment variables: read once, at the first question, and kept until forgotten."""

from __future__ import annotations

import os

__all__ = ["DEVICE", "PRECISION", "forget", "read"]

DEVICE = "AMPHAL_DEVICE"
PRECISION = "AMPHAL_PRECISION"

_values: dict[str, str] = {}


def read(name: str) -> str:
    """The value of ``DEVICE`` or ``PRECISION`` at the first question, stripped; empty if unset."""
    value = _values.get(name)
    if value is None:
        # Both at once, so that they are of one moment.
        found = {n: os.environ.get(n, "").strip() for n in (DEVICE, PRECISION)}
        _values.update(found)
        value = found[name]  # another thread may forget what was kept
    return value


def forget() -> None:
    """Read both again at the next question."""
    _values.clear()
