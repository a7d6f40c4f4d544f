"""The cuda backend."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from amphal import Availability, Backend, DtypeSupport, Hardware, ScalerSupport
from amphal.backends import _lists


def available() -> Availability:
    """Whether the device is there."""
    ok = torch.cuda.is_available()
    return Availability(ok, "" if ok else "torch.cuda.is_available() is False")


def probe(index: int | None) -> Hardware:
    """Facts about the device."""
    return Hardware("cuda", name="cuda", index=index)


def dtypes(hw: Hardware) -> Mapping[torch.dtype, DtypeSupport]:
    """What each dtype is worth."""
    return {}


def scaler(hw: Hardware) -> ScalerSupport:
    """What a gradient scaler can count on."""
    return ScalerSupport(True, True, True, True)


BACKEND = Backend("cuda", 100, available, probe, dtypes, _lists.cuda, scaler)
