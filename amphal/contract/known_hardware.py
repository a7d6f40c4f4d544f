"""``known_hardware()``: facts about real devices, to ask what ``detect()`` says of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

from .records import Hardware

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["KnownHardware", "known_hardware"]


@dataclass(frozen=True)
class KnownHardware:
    """One device of the table: its facts, and where they are published."""

    hardware: Hardware
    """The facts; what is not known of the device is left at its default."""
    source: str
    """The public pages or threads that the facts are taken from."""


@functools.cache
def known_hardware() -> Mapping[str, KnownHardware]:
    """Facts about known devices by a short name such as ``"t4"``; read-only, read on first use.

    ``amphal.detect(amphal.known_hardware()["t4"].hardware)`` answers as on a machine with that
    device and the torch that is installed here.
    """
    text = resources.files("amphal.data").joinpath("hardware.toml").read_text(encoding="utf-8")
    rows = {}
    for key, facts in tomllib.loads(text).items():
        source = facts.pop("source")
        rows[key] = KnownHardware(Hardware(**facts), source)
    return MappingProxyType(rows)
