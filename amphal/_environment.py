"""The two environment variables, read at every call and cheaply."""

from __future__ import annotations

import os
from collections.abc import Callable

__all__ = ["DEVICE", "PRECISION", "read"]

DEVICE = "AMPHAL_DEVICE"
PRECISION = "AMPHAL_PRECISION"


def _reader() -> Callable[[str], str]:
    # os.environ.get() of an absent name costs over 1 us (an exception inside), and detect() reads
    # two names at each call. The mapping behind it answers in a tenth of that. It is private to
    # CPython (checked on 3.10 to 3.13), so its absence is no error here.
    try:
        environ = os.environ
        data, encode, decode = os.environ._data, os.environ.encodekey, os.environ.decodevalue  # type: ignore[attr-defined]
        keys = {name: encode(name) for name in (DEVICE, PRECISION)}
    except AttributeError:  # pragma: no cover - another Python implementation
        return lambda name: os.environ.get(name, "").strip()

    def read(name: str) -> str:
        if os.environ is not environ:  # a test put another object in its place
            return os.environ.get(name, "").strip()
        raw = data.get(keys[name])
        return decode(raw).strip() if raw else ""

    return read


read = _reader()
"""The value of ``DEVICE`` or ``PRECISION`` now, stripped; empty if unset."""
