"""The CPU, by its instruction set flags: a backend like the others, of the lowest priority."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from amphal.backends import _lists
from amphal.contract import Availability, Backend, DtypeSupport, Hardware, ScalerSupport

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}

# The flags that are kept, in the spelling of torch.cpu.get_capabilities().
_X86 = "sse2 avx avx2 avx512_f avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_fp16"
_ARM = "neon dot i8mm fp16_arith bf16 sve sve2 sve_bf16"
_FLAGS = frozenset(f"{_X86} {_ARM}".split())

# Linux's spelling in /proc/cpuinfo, where it is another one.
_LINUX = {
    "avx512f": "avx512_f",
    "asimd": "neon",
    "asimddp": "dot",
    "asimdhp": "fp16_arith",
    "svebf16": "sve_bf16",
}


def available() -> Availability:
    """There is always a CPU."""
    return Availability(True)


def _from_torch(capabilities: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
    flags = {name for name, has in capabilities.items() if has is True}
    return str(capabilities.get("cpu_name") or ""), _FLAGS & flags


def _from_linux(cpuinfo: str) -> tuple[str, frozenset[str]]:
    """The first processor of ``/proc/cpuinfo``: "model name" (x86 only), "flags" or "Features"."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    words = fields.get("flags", fields.get("Features", "")).split()
    return fields.get("model name", ""), _FLAGS & {_LINUX.get(word, word) for word in words}


def _read() -> tuple[str, frozenset[str]]:
    """The CPU's name and flags; no flags where nobody tells (before torch 2.11, Linux only)."""
    capabilities: Callable[[], Mapping[str, Any]] | None
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        return _from_torch(capabilities())
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return _from_linux(file.read())
    except OSError:
        return "", frozenset()


def _vendor(name: str, architecture: str) -> str:
    for word, vendor in (("intel", "intel"), ("amd", "amd"), ("apple", "apple")):
        if word in name.lower():
            return vendor
    return "arm" if architecture == "aarch64" else ""


def probe(index: int | None) -> Hardware:
    """The CPU's name and flags; IPEX is seen if it is imported already, and never imported."""
    name, flags = _read()
    machine = platform.machine().lower()
    architecture = _MACHINES.get(machine, machine)
    if "intel_extension_for_pytorch" in sys.modules:
        flags |= {"ipex"}
    return Hardware(
        "cpu",
        name or platform.processor() or f"{architecture} CPU",
        index=index,
        vendor=_vendor(name, architecture),
        architecture=architecture,
        flags=flags,
        os=platform.system().lower(),
    )


def _x86(flags: frozenset[str]) -> tuple[DtypeSupport, DtypeSupport]:
    if "amx_bf16" in flags:
        bf16 = DtypeSupport("native", True, "AMX multiplies bf16 tiles")
    elif "avx512_bf16" in flags:
        bf16 = DtypeSupport("native", True, "AVX512_BF16 multiplies it")
    else:
        why = "no AVX512_BF16 or AMX: a bf16 matmul converts to fp32 first and is slower than fp32"
        bf16 = DtypeSupport("emulated", False, why)
    if "amx_fp16" in flags:
        fp16 = DtypeSupport("native", True, "AMX multiplies fp16 tiles")
    elif "avx512_fp16" in flags:
        why = "AVX512_FP16 without AMX-FP16: an fp16 matmul measured hardly faster than fp32"
        fp16 = DtypeSupport("native", False, why)
    else:
        why = "no AVX512_FP16 or AMX-FP16: an fp16 matmul converts to fp32 first"
        fp16 = DtypeSupport("emulated", False, why)
    return bf16, fp16


def _arm(flags: frozenset[str], macos: bool) -> tuple[DtypeSupport, DtypeSupport]:
    if "bf16" not in flags:
        why = "this Arm CPU has no BF16 instructions: a bf16 matmul converts to fp32"
        bf16 = DtypeSupport("emulated", False, why)
    elif macos:
        why = "torch on macOS has no oneDNN to use the BF16 instructions; fp32 runs on Accelerate"
        bf16 = DtypeSupport("native", False, why)
    else:
        bf16 = DtypeSupport("native", True, "Arm's BF16 instructions multiply it (oneDNN)")
    if "fp16_arith" in flags:
        # On a Graviton with both, in torch's own benchmark runs (pytorch#134282).
        why = "fp16 arithmetic, but torch's fp16 on Arm measured 2 to 10 times slower than bf16"
        return bf16, DtypeSupport("native", False, why)
    return bf16, DtypeSupport("emulated", False, "this Arm CPU has no fp16 arithmetic")


def _support(hw: Hardware) -> tuple[DtypeSupport, DtypeSupport]:
    flags = hw.flags & _FLAGS
    if flags and hw.architecture == "x86_64":
        return _x86(flags)
    if flags and hw.architecture == "aarch64":
        return _arm(flags, hw.os == "darwin")
    why = "this CPU's flags are unknown (torch 2.11 and later read them on x86 and Arm)"
    return DtypeSupport("emulated", False, why), DtypeSupport("emulated", False, why)


def dtypes(hw: Hardware) -> Mapping[torch.dtype, DtypeSupport]:
    """By the flags; the name decides nothing."""
    bf16, fp16 = _support(hw)
    return {torch.bfloat16: bf16, torch.float16: fp16}


def scaler(hw: Hardware) -> ScalerSupport:
    """Everything, on every CPU (Adam, AdamW, SGD and Adagrad are fused)."""
    return ScalerSupport(
        native_kernels=True, fp64=True, detects_overflow=True, fused_optimizers=True
    )


def float32_matmul(hw: Hardware) -> Mapping[str, str]:
    """With AMX, "medium" lets oneDNN multiply in bf16; "high" (TF32) changes nothing on a CPU.

    Measured on torch 2.13 with oneDNN held to one instruction set after the other
    (``ONEDNN_MAX_CPU_ISA``): the largest relative error of products under "medium" is 2e-3 with
    AMX, and 9e-7 with AVX512_BF16, AVX512_FP16 or AVX512 alone, where oneDNN multiplies in fp32.
    """
    if hw.architecture == "x86_64" and "amx_bf16" in hw.flags:
        return {"medium": "oneDNN multiplies in bf16"}
    return {}


BACKEND = Backend(
    "cpu",
    priority=0,
    available=available,
    probe=probe,
    dtypes=dtypes,
    op_lists=_lists.cpu,
    scaler=scaler,
    float32_matmul=float32_matmul,
)
