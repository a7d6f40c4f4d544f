"""Intel GPUs, by the properties that the driver reports.

torch's ``torch.xpu.is_bf16_supported()`` is not asked: it counts emulation as support, and up to
torch 2.7 it was True even without a device.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import warnings
from collections.abc import Mapping

import torch

from amphal.backends import _lists
from amphal.contract import Availability, Backend, DtypeSupport, Hardware, ScalerSupport

_FP16 = "has_fp16"
_FP64 = "has_fp64"
_BF16 = "has_bfloat16_conversions"
_DPAS = "has_subgroup_matrix_multiply_accumulate"

# A missing _BF16 or _DPAS is no "no": torch asks an offline compiler for them, and without it they
# are False on every device (pytorch#196074: an Arc B580 at 100 TFLOP/s of bf16). So the products
# with XMX matrix engines count too: Arc A and B, Data Center Max and Flex, Arrow Lake-H (140T,
# 130T), Lunar Lake (140V, 130V). Meteor Lake ("Arc Graphics", no number) and Iris Xe have none.
_XMX = re.compile(r"Arc\(TM\) (Pro )?[AB]\d|Arc\(TM\) 1[34]0[TV]|Data Center GPU (Max|Flex)")


def available() -> Availability:
    """Yes with a visible GPU; else whether torch, the driver or the device is missing."""
    if getattr(torch.version, "xpu", None) is None:
        why = "this torch is built without XPU; install a build with it for an Intel GPU"
        return Availability(False, f"{why} (https://pytorch.org/get-started/locally)")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ok = torch.xpu.is_available()
    except Exception as exc:
        return Availability(False, f"the driver failed: {type(exc).__name__}: {exc}")
    if ok:
        return Availability(True)
    if caught:
        return Availability(False, f"the driver failed: {caught[0].message}")
    hide = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")
    hidden = [f"{name}={os.environ[name]!r}" for name in hide if name in os.environ]
    reason = "no Intel GPU is visible to torch; check sycl-ls and the driver"
    return Availability(False, f"{reason} ({', '.join(hidden)} is set)" if hidden else reason)


def probe(index: int | None) -> Hardware:
    """The device's properties as the driver gives them; IPEX is seen if it is imported already."""
    properties = torch.xpu.get_device_properties(current_index() if index is None else index)
    flags = {f for f in (_FP16, _FP64, _BF16, _DPAS) if getattr(properties, f, False)}
    if "intel_extension_for_pytorch" in sys.modules:
        flags.add("ipex")
    return Hardware(
        "xpu",
        properties.name,
        index=index,
        vendor="intel",
        flags=frozenset(flags),
        os=platform.system().lower(),
        memory=properties.total_memory,
    )


def _multiplies(hw: Hardware) -> DtypeSupport | None:
    if _DPAS in hw.flags or _XMX.search(hw.name):
        return DtypeSupport("native", True, "XMX matrix engines multiply it")
    return None


def _bf16(hw: Hardware) -> DtypeSupport:
    if _BF16 in hw.flags:
        why = "the driver reports bf16 conversion, but no matrix engines to multiply it"
        return DtypeSupport("native", False, why)
    return DtypeSupport("emulated", False, "no bf16 conversion and no XMX matrix engines are known")


def _fp16(hw: Hardware) -> DtypeSupport:
    if _FP16 not in hw.flags:
        return DtypeSupport("absent", False, "the driver reports no fp16")
    return DtypeSupport("native", True, "fp16 arithmetic at twice the rate of fp32")


def dtypes(hw: Hardware) -> Mapping[torch.dtype, DtypeSupport]:
    """By the driver's flags and, for matrix engines, by the product's name."""
    fast = _multiplies(hw)
    return {torch.bfloat16: fast or _bf16(hw), torch.float16: fast or _fp16(hw)}


def scaler(hw: Hardware) -> ScalerSupport:
    """The ``_amp_*`` kernels are native (CPU fallbacks ended with torch 2.5); fp64 by its flag.

    Fused optimizers need fp64 too: their kernels compute the step in double.
    """
    fp64 = _FP64 in hw.flags
    return ScalerSupport(
        native_kernels=True, fp64=fp64, detects_overflow=True, fused_optimizers=fp64
    )


def current_index() -> int | None:
    """The index of this thread's current device."""
    return torch.xpu.current_device()


def synchronize() -> None:
    """Wait for the current device."""
    torch.xpu.synchronize()


BACKEND = Backend(
    "xpu",
    priority=90,
    available=available,
    probe=probe,
    dtypes=dtypes,
    op_lists=_lists.xpu,
    scaler=scaler,
    current_index=current_index,
    synchronize=synchronize,
)
