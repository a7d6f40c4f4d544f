"""Moore Threads GPUs, through torch_musa. NOT RUN ON HARDWARE: written from public facts.

Facts: the op lists and the AMP dtypes (fp16, and bf16 where the runtime says so) are torch_musa's
source; no bf16 in 2023 is torch_musa#21; AMP was verified on the MTT S5000, capability 3.1, in
Torch-FL PR#145. Which older model has native bf16 is not published, so the runtime is asked.
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
    """Whether torch_musa loads and finds a device."""
    try:
        import torch_musa  # noqa: F401  (it gives torch the device type)

        ok = torch.musa.is_available()  # type: ignore[attr-defined]
    except Exception as exc:  # no package, or no driver under it
        return Availability(False, f"torch_musa cannot be used: {type(exc).__name__}: {exc}")
    return Availability(ok, "" if ok else "torch.musa.is_available() is False: is the driver up?")


def current_index() -> int:
    """The device that "musa" without an index means."""
    return torch.musa.current_device()  # type: ignore[attr-defined, no-any-return]


def probe(index: int | None) -> Hardware:
    """The name, the memory, the capability as a flag, and the runtime's answer about bf16."""
    musa: Any = torch.musa  # type: ignore[attr-defined]
    properties = musa.get_device_properties(current_index() if index is None else index)
    flags = {f"mp_{properties.major}{properties.minor}"}
    if getattr(musa, "is_bf16_supported", lambda: False)():
        flags.add("bf16")
    return Hardware(
        "musa",
        properties.name,
        index=index,
        vendor="moore threads",
        flags=frozenset(flags),
        os=platform.system().lower(),
        memory=properties.total_memory,
    )


def dtypes(hw: Hardware) -> Mapping[torch.dtype, DtypeSupport]:
    """fp16 everywhere, bf16 where the runtime reports it."""
    fp16 = DtypeSupport("native", True, "torch_musa's AMP offers fp16 on every device")
    if "bf16" in hw.flags:
        bf16 = DtypeSupport(
            "native", True, "the runtime reports bf16, so torch_musa's AMP offers it"
        )
    else:
        bf16 = DtypeSupport("absent", False, "the runtime does not report bf16 on this model")
    return {torch.bfloat16: bf16, torch.float16: fp16}


def op_lists(dtype: torch.dtype) -> OpLists:
    """torch's shared lists, as XPU has them, and the convolution of an out-of-tree device."""
    shared = amphal.contract.get_backend("xpu").op_lists(dtype)
    return OpLists(
        lower_precision=shared.lower_precision | {"convolution_overrideable"},
        fp32=shared.fp32,
        fp32_set_opt_dtype=shared.fp32_set_opt_dtype,
        fp32_append_dtype=shared.fp32_append_dtype,
        promote=shared.promote,
        banned=shared.banned,
    )


def scaler(hw: Hardware) -> ScalerSupport:
    """The portable path of amphal's scaler, which needs no vendor kernel and no float64.

    That an overflow gives inf is assumed; the conformance suite checks it on a device.
    """
    return ScalerSupport(
        native_kernels=False, fp64=False, detects_overflow=True, fused_optimizers=False
    )


def synchronize() -> None:
    """Wait for the device's queued work."""
    torch.musa.synchronize()  # type: ignore[attr-defined]


BACKEND = Backend(
    "musa",
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
