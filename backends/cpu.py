"""The CPU: a backend like the others, of the lowest priority, so it is the fallback."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch

from amphal import Availability, Backend, DtypeSupport, Hardware, ScalerSupport
from amphal.backends import _lists


def available() -> Availability:
    """There is always a CPU."""
    return Availability(True)


def probe(index: int | None) -> Hardware:
    """Facts about the CPU."""
    caps = torch.cpu.get_capabilities()
    flags = frozenset(k for k, v in caps.items() if v is True)
    return Hardware(
        "cpu", str(caps.get("cpu_name", "CPU")), architecture=platform.machine(), flags=flags
    )


def dtypes(hw: Hardware) -> Mapping[torch.dtype, DtypeSupport]:
    """What each dtype is worth."""
    bf16 = "amx_bf16" in hw.flags or "avx512_bf16" in hw.flags
    return {
        torch.bfloat16: DtypeSupport("native" if bf16 else "emulated", bf16, "by its flags"),
        torch.float16: DtypeSupport("emulated", False, "by its flags"),
    }


def scaler(hw: Hardware) -> ScalerSupport:
    """What a gradient scaler can count on."""
    return ScalerSupport(True, True, True, True)


BACKEND = Backend("cpu", 0, available, probe, dtypes, _lists.cpu, scaler)
