"""The contract of a backend: frozen records and plain functions, no torch state.

A backend is one module with one :class:`Backend` in it. Its rules:

1. ``available()`` never raises and imports vendor modules inside itself; a "no" carries its reason.
2. ``probe(index)`` is the only function that reads the machine. It returns a :class:`Hardware`:
   facts as the driver tells them, no judgement.
3. ``dtypes``, ``op_lists`` and ``scaler`` are pure: the same record gives the same answer on any
   machine, so a decision for hardware that is not here is an ordinary unit test.
4. Nothing runs at import time: importing a backend imports no vendor module and touches no device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch

from .._torch import torch_version
from ..errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from .op_lists import OpLists

__all__ = [
    "CONTRACT_VERSION",
    "LOW_PRECISION",
    "PRECISIONS",
    "Availability",
    "Backend",
    "DtypeSupport",
    "Hardware",
    "ScalerSupport",
    "torch_version",
]

CONTRACT_VERSION = 1
"""The version of this contract; a backend that declares another one is refused with both named."""

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""The two dtypes that autocast can lower to, the preferred one first."""

PRECISIONS: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""The names of a precision that every entry point understands."""

Level = Literal["native", "emulated", "absent"]
_LEVELS = ("native", "emulated", "absent")
LARGEST_INDEX = 127
"""The largest device index: torch keeps it in eight bits, and wraps what does not fit."""
_DEVICE_TYPE = re.compile(r"[a-z][a-z0-9_]*\Z")


def _check(owner: str, name: str, value: object, kind: type | tuple[type, ...], want: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise ArgumentTypeError(
            f"{owner}: {name} must be {want}, got {type(value).__name__} ({value!r})"
        )


@dataclass(frozen=True)
class Availability:
    """Whether a device can be used now, and why not if it cannot. True or false as a whole."""

    ok: bool
    reason: str = ""

    def __post_init__(self) -> None:
        _check("Availability", "ok", self.ok, bool, "True or False")
        _check("Availability", "reason", self.reason, str, "a string")
        if not self.ok and not self.reason:
            raise ArgumentError("Availability(False) needs a reason: say why the device is absent")

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Hardware:
    """Facts about one device, as the driver and the OS tell them: no judgement, no torch state.

    Build one by hand to ask what :func:`amphal.detect` would say on a machine you don't have.
    """

    device_type: str
    """The torch device type, such as ``"cuda"``."""
    name: str
    """The product name as the driver gives it, such as ``"Tesla T4"``."""
    index: int | None = None
    """The device's index, or None where the device type has no indices or it does not matter."""
    vendor: str = ""
    """``"nvidia"``, ``"amd"``, ``"intel"``, ``"apple"``, ``"arm"`` …; empty if unknown."""
    architecture: str = ""
    """The vendor's architecture name: ``"gfx90a"``, ``"x86_64"``, ``"aarch64"``, ``"M1"`` …"""
    capability: tuple[int, int] | None = None
    """The CUDA compute capability, where there is one."""
    flags: frozenset[str] = frozenset()
    """Feature flags in the driver's spelling, such as ``"amx_bf16"`` or ``"has_fp64"``."""
    os: str = ""
    """``"linux"``, ``"darwin"`` or ``"windows"``."""
    os_version: tuple[int, ...] = ()
    """The version of the OS, where a decision depends on it (macOS)."""
    memory: int | None = None
    """Device memory in bytes, or None if unknown."""
    torch: tuple[int, int] = field(default_factory=torch_version)
    """The torch that would run, as ``(major, minor)``: some kernels came with a version."""

    def __post_init__(self) -> None:
        _check("Hardware", "device_type", self.device_type, str, "a string")
        if not _DEVICE_TYPE.match(self.device_type):
            raise ArgumentError(
                f"Hardware: device_type must be a torch device type such as 'cuda', "
                f"without an index, got {self.device_type!r}"
            )
        for name in ("name", "vendor", "architecture", "os"):
            _check("Hardware", name, getattr(self, name), str, "a string")
        if self.index is not None:
            _check("Hardware", "index", self.index, int, "an int or None")
            if not 0 <= self.index <= LARGEST_INDEX:
                raise ArgumentError(
                    f"Hardware: index must be 0 to {LARGEST_INDEX}, got {self.index}"
                )
        if self.memory is not None:
            _check("Hardware", "memory", self.memory, int, "a number of bytes or None")
            if self.memory < 0:
                raise ArgumentError(f"Hardware: memory must be 0 or more bytes, got {self.memory}")
        for name in ("capability", "os_version", "torch"):
            value = getattr(self, name)
            if value is None and name == "capability":
                continue
            try:
                if isinstance(value, str) or any(isinstance(v, str) for v in value):
                    raise TypeError
                value = tuple(int(v) for v in value)
            except (TypeError, ValueError, OverflowError):
                raise ArgumentTypeError(
                    f"Hardware: {name} must be a tuple of ints, got {value!r}"
                ) from None
            if name != "os_version" and len(value) != 2:
                raise ArgumentError(f"Hardware: {name} must be two ints, got {value!r}")
            object.__setattr__(self, name, value)
        flags = self.flags
        whole = isinstance(flags, (set, frozenset, list, tuple))
        if not whole or not all(isinstance(flag, str) for flag in flags):
            raise ArgumentTypeError(f"Hardware: flags must be a set of strings, got {flags!r}")
        object.__setattr__(self, "flags", frozenset(flags))

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON-able values."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["flags"] = sorted(self.flags)
        out["capability"] = None if self.capability is None else list(self.capability)
        out["os_version"] = list(self.os_version)
        out["torch"] = list(self.torch)
        return out


@dataclass(frozen=True)
class DtypeSupport:
    """What one dtype is worth on one piece of hardware.

    ``level`` says whether the hardware computes in it; ``accelerated`` says whether autocast to it
    is faster than fp32 there. They are separate: a T4 runs bf16, emulated, slower than fp32.
    """

    level: Level
    accelerated: bool
    why: str
    """The fact behind the answer, a phrase a person reads."""

    def __post_init__(self) -> None:
        if self.level not in _LEVELS:
            raise ArgumentError(
                f"DtypeSupport: level must be one of {', '.join(_LEVELS)}, got {self.level!r}"
            )
        _check("DtypeSupport", "accelerated", self.accelerated, bool, "True or False")
        if not isinstance(self.why, str) or not self.why:
            raise ArgumentError("DtypeSupport: why must say the fact behind the answer")
        if self.level == "absent" and self.accelerated:
            raise ArgumentError("DtypeSupport: an absent dtype cannot be accelerated")


@dataclass(frozen=True)
class ScalerSupport:
    """What a gradient scaler can count on, on one piece of hardware."""

    native_kernels: bool
    """The ``_amp_*`` kernels exist for this device; without them a portable path is used."""
    fp64: bool
    """The device has float64. (amphal's scaler never needs it; torch's own does.)"""
    detects_overflow: bool
    """An overflow gives inf or NaN. False where the hardware saturates instead."""
    fused_optimizers: bool
    """torch's fused optimizers run on this device and accept ``grad_scale`` and ``found_inf``."""

    def __post_init__(self) -> None:
        for f in fields(self):
            _check("ScalerSupport", f.name, getattr(self, f.name), bool, "True or False")


def _no_index() -> int | None:
    return None


def _no_choice(hardware: Hardware) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Backend:
    """One device, declared: what :mod:`amphal` needs to know to run mixed precision on it."""

    device_type: str
    """The torch device type, such as ``"cuda"``; also the name of the entry point."""
    priority: int
    """:func:`amphal.detect` takes the available backend of highest priority (cuda 100, cpu 0)."""
    available: Callable[[], Availability]
    """Whether the device can be used now. Never raises."""
    probe: Callable[[int | None], Hardware]
    """Facts about the device of this index (None: the current one)."""
    dtypes: Callable[[Hardware], Mapping[torch.dtype, DtypeSupport]]
    """Support for bfloat16 and float16 (float32 is implied). Pure."""
    op_lists: Callable[[torch.dtype], OpLists]
    """The casting policy of this device's autocast for a dtype, as declared. Pure."""
    scaler: Callable[[Hardware], ScalerSupport]
    """What a gradient scaler can count on. Pure."""
    current_index: Callable[[], int | None] = _no_index
    """The index that a device string without one means now; None where there are no indices."""
    vendor_scaler: Callable[[], type[torch.amp.GradScaler]] | None = None
    """The vendor's scaler class, where only it can see an overflow (``detects_overflow`` False)."""
    synchronize: Callable[[], None] | None = None
    """Wait for the device's queued work, for measuring; None where work is done when it returns."""
    float32_matmul: Callable[[Hardware], Mapping[str, str]] = _no_choice
    """Which of torch's float32 matmul precisions below "highest" change a matmul, and how. Pure."""
    contract: int = 1
    """The version of the contract that the backend was written for: a number in its own file. A
    backend without one was written for the first contract."""

    def __post_init__(self) -> None:
        if self.contract != CONTRACT_VERSION:
            raise ArgumentError(
                f"Backend {self.device_type!r} was written for contract {self.contract!r}, "
                f"this amphal speaks contract {CONTRACT_VERSION}; "
                "install the versions of both that match"
            )
        _check("Backend", "device_type", self.device_type, str, "a string")
        if not _DEVICE_TYPE.match(self.device_type):
            raise ArgumentError(
                f"Backend: device_type must be a torch device type such as 'cuda' (lower case, "
                f"no index), got {self.device_type!r}"
            )
        _check("Backend", "priority", self.priority, int, "an int")
        for name in (
            "available",
            "probe",
            "dtypes",
            "op_lists",
            "scaler",
            "current_index",
            "float32_matmul",
        ):
            value = getattr(self, name)
            if not callable(value):
                raise ArgumentTypeError(
                    f"Backend {self.device_type!r}: {name} must be a function, got {value!r}"
                )
        for name in ("vendor_scaler", "synchronize"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ArgumentTypeError(
                    f"Backend {self.device_type!r}: {name} must be a function or None, "
                    f"got {value!r}"
                )
