"""Apple GPUs, by chip (M1, M2 …) and macOS version; torch has no bf16 query for them."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Mapping

import torch

from amphal.backends import _lists
from amphal.contract import Availability, Backend, DtypeSupport, Hardware, ScalerSupport

_CHIP = re.compile(r"Apple (M\d+)\b")


def available() -> Availability:
    """Yes on a Mac that torch can drive; else whether it is torch or the machine."""
    if platform.system() != "Darwin":
        return Availability(False, f"Apple GPUs need macOS; this is {platform.system()}")
    try:
        built, ok = torch.backends.mps.is_built(), torch.backends.mps.is_available()
    except Exception as exc:
        return Availability(False, f"Metal failed: {type(exc).__name__}: {exc}")
    if ok:
        return Availability(True)
    if not built:
        return Availability(False, "this torch is built without MPS; install an arm64 build of it")
    return Availability(False, "torch finds no usable Metal device; it needs Apple silicon")


def _chip_name() -> str:
    name = getattr(torch.backends.mps, "get_name", lambda: "")()
    if _CHIP.match(name):
        return str(name)
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return str(name) or "Apple GPU"
    return done.stdout.strip() or str(name) or "Apple GPU"


def _macos_version() -> tuple[int, ...]:
    version = tuple(int(part) for part in platform.mac_ver()[0].split(".") if part.isdigit())
    if version[:1] != (10,):
        return version
    # A Python built against an old SDK is told 10.16 on every newer macOS; torch is told the truth.
    for major in (15, 14, 13):
        if torch.backends.mps.is_macos_or_newer(major, 0):
            return (major, 0)
    return version


def probe(index: int | None) -> Hardware:
    """The chip's name, its generation and the macOS version."""
    name = _chip_name()
    chip = _CHIP.match(name)
    return Hardware(
        "mps",
        name,
        index=index,
        vendor="apple",
        architecture=chip[1] if chip else "",
        os="darwin",
        os_version=_macos_version(),
    )


def _bf16(hw: Hardware) -> DtypeSupport:
    if hw.os_version and hw.os_version < (14,):
        version = ".".join(map(str, hw.os_version))
        why = f"bf16 needs macOS 14 (Metal 3.1), this is macOS {version}"
        return DtypeSupport("absent", False, why)
    if not hw.os_version or not re.fullmatch(r"M\d+", hw.architecture):
        why = "the chip or the macOS version is unknown, so bf16 is only used if you name it"
        return DtypeSupport("emulated", False, why)
    if int(hw.architecture[1:]) <= 2:
        why = "M1 and M2 emulate bf16 through fp32, at half of its rate"
        return DtypeSupport("emulated", False, why)
    return DtypeSupport("native", True, "native from M3 on, with half of fp32's memory traffic")


def dtypes(hw: Hardware) -> Mapping[torch.dtype, DtypeSupport]:
    """bf16 by macOS version and chip; fp16 on every Apple GPU."""
    fp16 = DtypeSupport("native", True, "every Apple GPU computes it, with half the memory traffic")
    return {torch.bfloat16: _bf16(hw), torch.float16: fp16}


def scaler(hw: Hardware) -> ScalerSupport:
    """No fp64. The ``_amp_*`` kernels came with torch 2.8.

    Fused optimizers count from torch 2.13: before, they ran but ignored ``grad_scale`` and
    ``found_inf``, and stepped on an overflow (pytorch#186360).
    """
    return ScalerSupport(
        native_kernels=hw.torch >= (2, 8),
        fp64=False,
        detects_overflow=True,
        fused_optimizers=hw.torch >= (2, 13),
    )


def synchronize() -> None:
    """Wait for the device; there is one."""
    torch.mps.synchronize()


BACKEND = Backend(
    "mps",
    priority=80,
    available=available,
    probe=probe,
    dtypes=dtypes,
    op_lists=_lists.mps,
    scaler=scaler,
    synchronize=synchronize,
)
