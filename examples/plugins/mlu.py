"""Cambricon MLU, through torch_mlu. NOT RUN ON HARDWARE: written from public facts.

Facts: the op lists (torch's shared ones with CUDA's convolutions), the runtime's bf16 query and a
scaler class that adds nothing to torch's are torch_mlu's source; no 64-bit floats are mmcv PR#1429.
bf16 by model (MLU370, MLU590) is not published, so the runtime is asked.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

import amphal
from amphal import Hardware, OpLists
from amphal.contract import Availability, Backend, DtypeSupport, ScalerSupport


def available() -> Availability:
    """Whether torch_mlu loads and finds a device."""
    try:
        import torch_mlu  # noqa: F401  (it gives torch the device type)

        ok = torch.mlu.is_available()  # type: ignore[attr-defined]
    except Exception as exc:  # no package, or no driver under it
        return Availability(False, f"torch_mlu cannot be used: {type(exc).__name__}: {exc}")
    return Availability(ok, "" if ok else "torch.mlu.is_available() is False: does cnmon list one?")


def current_index() -> int:
    """The device that "mlu" without an index means."""
    return torch.mlu.current_device()  # type: ignore[attr-defined, no-any-return]


def probe(index: int | None) -> Hardware:
    """The name (such as "MLU370"), the memory, and the runtime's answer about bf16."""
    mlu: Any = torch.mlu  # type: ignore[attr-defined]
    properties = mlu.get_device_properties(current_index() if index is None else index)
    return Hardware(
        "mlu",
        properties.name,
        index=index,
        vendor="cambricon",
        flags=frozenset({"bf16"} if mlu.is_bf16_supported() else ()),
        os=platform.system().lower(),
        memory=properties.total_memory,
    )


def dtypes(hw: Hardware) -> Mapping[torch.dtype, DtypeSupport]:
    """fp16 everywhere, bf16 where the runtime reports it."""
    fp16 = DtypeSupport("native", True, "torch_mlu's AMP offers fp16 on every device")
    if "bf16" in hw.flags:
        bf16 = DtypeSupport("native", True, "the runtime reports bf16, which frameworks rely on")
    else:
        bf16 = DtypeSupport("absent", False, "the runtime does not report bf16 on this model")
    return {torch.bfloat16: bf16, torch.float16: fp16}


def op_lists(dtype: torch.dtype) -> OpLists:
    """CUDA's lists: torch_mlu registers the same ops with the same policies."""
    return amphal.contract.get_backend("cuda").op_lists(dtype)


def scaler(hw: Hardware) -> ScalerSupport:
    """No float64; the portable path of amphal's scaler needs none of the vendor's kernels.

    That an overflow gives inf is assumed; the conformance suite checks it on a device.
    """
    return ScalerSupport(
        native_kernels=False, fp64=False, detects_overflow=True, fused_optimizers=False
    )


def synchronize() -> None:
    """Wait for the device's queued work."""
    torch.mlu.synchronize()  # type: ignore[attr-defined]


BACKEND = Backend(
    "mlu",
    priority=70,
    available=available,
    probe=probe,
    dtypes=dtypes,
    op_lists=op_lists,
    scaler=scaler,
    current_index=current_index,
    synchronize=synchronize,
    contract=1,
)
