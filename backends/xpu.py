"""The xpu backend."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from amphal import Availability, Backend, DtypeSupport, Hardware, ScalerSupport
from amphal.backends import _lists


def available() -> Availability:
    """Whether the device is there."""
    ok = torch.xpu.is_available()
    return Availability(ok, "" if ok else "torch.xpu.is_available() is False")


def probe(index: int | None) -> Hardware:
    """Facts about the device."""
    return Hardware("xpu", name="xpu", index=index)


def dtypes(hw: Hardware) -> Mapping[torch.dtype, DtypeSupport]:
    """What each dtype is worth."""
    return {}


def scaler(hw: Hardware) -> ScalerSupport:
    """What a gradient scaler can count on."""
    return ScalerSupport(True, True, True, True)


BACKEND = Backend("xpu", 90, available, probe, dtypes, _lists.xpu, scaler)
