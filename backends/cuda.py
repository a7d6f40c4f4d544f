"""NVIDIA GPUs by compute capability, and AMD GPUs (ROCm builds of torch) by gcnArchName.

torch's own ``is_bf16_supported()`` is not asked: it counts emulation as support, its answer has
changed with torch's version, and on ROCm it is True for every device.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Mapping

import torch

from amphal.backends import _lists
from amphal.contract import Availability, Backend, DtypeSupport, Hardware, ScalerSupport

_TENSOR_CORES = DtypeSupport("native", True, "tensor cores multiply it")
_TURING_FP16 = DtypeSupport(
    "native", True, "tensor cores, or on GTX 16 fp16 units at twice the rate of fp32"
)
_DOUBLE = DtypeSupport("native", True, "fp16 arithmetic at twice the rate of fp32")
_64TH = DtypeSupport("native", False, "fp16 arithmetic at 1/64 of the rate of fp32")
_STORAGE = DtypeSupport(
    "emulated", False, "no fp16 arithmetic before compute capability 5.3, only storage"
)
_CONVERTS = "torch converts to fp32 and back; bf16 units came with compute capability 8.0"
_EMULATED = DtypeSupport("emulated", False, _CONVERTS)
_TURING_BF16 = DtypeSupport(
    "emulated", False, f"{_CONVERTS}; a T4 reaches less than half of fp32's rate with it"
)
_NO_GEMM = DtypeSupport("absent", False, "cuBLAS multiplies bf16 from compute capability 5.0 on")

# (lowest compute capability, bf16, fp16), newest first. The rates are results per clock and
# multiprocessor, from the throughput table of NVIDIA's CUDA programming guide.
_NVIDIA = (
    ((8, 0), _TENSOR_CORES, _TENSOR_CORES),
    ((7, 5), _TURING_BF16, _TURING_FP16),
    ((7, 0), _EMULATED, _TENSOR_CORES),
    ((6, 2), _EMULATED, _DOUBLE),
    ((6, 1), _EMULATED, _64TH),
    ((6, 0), _EMULATED, _DOUBLE),
    ((5, 3), _EMULATED, _DOUBLE),
    ((5, 0), _EMULATED, _STORAGE),
    ((0, 0), _NO_GEMM, _STORAGE),
)

_MATRIX_CORES = DtypeSupport("native", True, "CDNA matrix cores multiply it")
_WMMA = DtypeSupport("native", True, "the WMMA instructions of RDNA3 and later multiply it")
_PACKED = DtypeSupport("native", True, "packed fp16 arithmetic")
_UNPACKED = DtypeSupport("emulated", False, "no packed fp16 arithmetic before Vega")
_RDNA_BF16 = DtypeSupport(
    "absent", False, "RDNA1 and RDNA2 have no bf16, and compiling it can crash the process in LLVM"
)
_GCN_BF16 = DtypeSupport("emulated", False, "no bf16 units before CDNA; emulated in software")

# (prefixes of the LLVM target, bf16, fp16).
_AMD = (
    (("gfx908", "gfx90a", "gfx94", "gfx95"), _MATRIX_CORES, _MATRIX_CORES),
    (("gfx11", "gfx12"), _WMMA, _WMMA),
    (("gfx101", "gfx103"), _RDNA_BF16, _PACKED),
    (("gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c"), _GCN_BF16, _PACKED),
    (("gfx6", "gfx7", "gfx8"), _GCN_BF16, _UNPACKED),
)


def _no_device(vendor: str, tool: str, hide: tuple[str, ...]) -> str:
    hidden = [f"{name}={os.environ[name]!r}" for name in hide if name in os.environ]
    reason = f"no {vendor} GPU is visible to torch; check {tool} and the driver"
    return f"{reason} ({', '.join(hidden)} is set)" if hidden else reason


def available() -> Availability:
    """Yes with a visible GPU; else whether torch, the driver or the device is missing."""
    amd = torch.version.hip is not None
    if torch.version.cuda is None and not amd:
        why = "this torch is built without CUDA or ROCm; install a build with one of them"
        return Availability(False, f"{why} (https://pytorch.org/get-started/locally)")
    try:
        # A driver that fails to start is a warning of torch's, and its text is the reason.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ok = torch.cuda.is_available()
    except Exception as exc:
        return Availability(False, f"the driver failed: {type(exc).__name__}: {exc}")
    if ok:
        return Availability(True)
    if caught:
        said = str(caught[0].message).split(" (Triggered internally")[0].strip()
        return Availability(False, f"the driver failed: {said}")
    if amd:
        hide = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        return Availability(False, _no_device("AMD", "rocminfo", hide))
    return Availability(False, _no_device("NVIDIA", "nvidia-smi", ("CUDA_VISIBLE_DEVICES",)))


def probe(index: int | None) -> Hardware:
    """The device's properties as the driver gives them."""
    properties = torch.cuda.get_device_properties(current_index() if index is None else index)
    amd = torch.version.hip is not None
    return Hardware(
        "cuda",
        properties.name,
        index=index,
        vendor="amd" if amd else "nvidia",
        # "gfx90a:sramecc+:xnack-": the part after the target is a mode, not another chip.
        architecture=properties.gcnArchName.split(":")[0] if amd else "",
        # ROCm fills major and minor from the gfx number; they are no compute capability.
        capability=None if amd else (properties.major, properties.minor),
        os=platform.system().lower(),
        memory=properties.total_memory,
    )


def _support(hw: Hardware) -> tuple[DtypeSupport, DtypeSupport]:
    if hw.architecture.startswith("gfx"):
        for prefixes, bf16, fp16 in _AMD:
            if hw.architecture.startswith(prefixes):
                return bf16, fp16
        why = f"nothing is known of bf16 on {hw.architecture}, so it is only used if you name it"
        return (
            DtypeSupport("emulated", False, why),
            DtypeSupport("native", True, "every AMD GPU from Vega on has packed fp16 arithmetic"),
        )
    if hw.capability is not None:
        for lowest, bf16, fp16 in _NVIDIA:
            if hw.capability >= lowest:
                return bf16, fp16
    why = "neither a compute capability nor an AMD architecture is known of this device"
    return DtypeSupport("emulated", False, why), DtypeSupport("emulated", False, why)


def dtypes(hw: Hardware) -> Mapping[torch.dtype, DtypeSupport]:
    """By compute capability (NVIDIA) or architecture (AMD); the name decides nothing."""
    bf16, fp16 = _support(hw)
    return {torch.bfloat16: bf16, torch.float16: fp16}


def scaler(hw: Hardware) -> ScalerSupport:
    """Everything, on every device that torch >= 2.6 runs on: Adam, AdamW and SGD are fused."""
    return ScalerSupport(
        native_kernels=True, fp64=True, detects_overflow=True, fused_optimizers=True
    )


def float32_matmul(hw: Hardware) -> Mapping[str, str]:
    """TF32 tensor cores came with compute capability 8.0; "medium" is the same there."""
    if hw.capability is not None and hw.capability >= (8, 0):
        return {"high": "TF32 on tensor cores"}
    return {}


def current_index() -> int | None:
    """The index of this thread's current device."""
    return torch.cuda.current_device()


def synchronize() -> None:
    """Wait for the current device."""
    torch.cuda.synchronize()


BACKEND = Backend(
    "cuda",
    priority=100,
    available=available,
    probe=probe,
    dtypes=dtypes,
    op_lists=_lists.cuda,
    scaler=scaler,
    current_index=current_index,
    synchronize=synchronize,
    float32_matmul=float32_matmul,
)
