"""Huawei Ascend, through torch_npu. NOT RUN ON HARDWARE: written from public facts.

Facts: the names of the chips and which of them saturate are torch_npu's (SocVersion,
IsSupportInfNan); bf16 from Atlas A2 and A3 on, and none on the 910A, are Huawei's documentation of
its loss scaling and LlamaFactory#4339; the op lists are torch_npu's AutoCastOps.cpp.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from typing import Any

import torch

import amphal
from amphal import Hardware, OpLists
from amphal.contract import Availability, Backend, DtypeSupport, ScalerSupport

_FIRST = re.compile(r"Ascend(910A|910B|910Pro[AB]|910PremiumA|310.*)\Z")
"""The first generation. A bare "Ascend910B" is one of it; "Ascend910B1" and later are Atlas A2."""
_LATER = re.compile(r"Ascend(910B\d|910_9\d)")


def available() -> Availability:
    """Whether torch_npu loads and finds a device."""
    try:
        import torch_npu  # noqa: F401  (it gives torch the device type)

        ok = torch.npu.is_available()  # type: ignore[attr-defined]
    except Exception as exc:  # no package, or no driver under it
        return Availability(False, f"torch_npu cannot be used: {type(exc).__name__}: {exc}")
    return Availability(ok, "" if ok else "torch.npu.is_available() is False: npu-smi info?")


def current_index() -> int:
    """The device that "npu" without an index means."""
    return torch.npu.current_device()  # type: ignore[attr-defined, no-any-return]


def probe(index: int | None) -> Hardware:
    """The name, the memory, and what torch_npu says of bf16 and of inf and NaN."""
    import torch_npu

    npu: Any = torch_npu.npu
    properties = npu.get_device_properties(current_index() if index is None else index)
    facts = {"bf16": npu.is_bf16_supported, "inf_nan": npu.utils.is_support_inf_nan}
    return Hardware(
        "npu",
        properties.name,
        index=index,
        vendor="huawei",
        flags=frozenset(name for name, has in facts.items() if has()),
        os=platform.system().lower(),
        memory=properties.total_memory,
    )


def _bf16(hw: Hardware) -> DtypeSupport:
    if _FIRST.match(hw.name):
        return DtypeSupport("absent", False, "the first generation of Ascend has no bf16")
    if "bf16" in hw.flags or _LATER.match(hw.name):
        return DtypeSupport("native", True, "Atlas A2 and later compute in bf16")
    return DtypeSupport("absent", False, f"torch_npu does not report bf16 on {hw.name}")


def dtypes(hw: Hardware) -> Mapping[torch.dtype, DtypeSupport]:
    """fp16 everywhere, bf16 from the second generation on."""
    fp16 = DtypeSupport("native", True, "fp16 is what torch_npu's autocast takes by default")
    return {torch.bfloat16: _bf16(hw), torch.float16: fp16}


def op_lists(dtype: torch.dtype) -> OpLists:
    """CUDA's lists, less the ops that torch_npu doesn't register."""
    cuda = amphal.contract.get_backend("cuda").op_lists(dtype)
    missing = {"linalg_vecdot", "rms_norm", "vdot"}
    return OpLists(
        lower_precision=cuda.lower_precision - missing,
        fp32=frozenset(
            op for op in cuda.fp32 - missing if not op.startswith(("upsample", "_upsample"))
        ),
        fp32_set_opt_dtype=cuda.fp32_set_opt_dtype,
        fp32_append_dtype=cuda.fp32_append_dtype,
        promote=cuda.promote - missing,
        banned=cuda.banned,
    )


def scaler(hw: Hardware) -> ScalerSupport:
    """The first generation saturates; later ones do where the environment asks for it.

    The portable path of amphal's scaler is used: it needs none of the vendor's kernels.
    """
    known = "inf_nan" in hw.flags or (not hw.flags and bool(_LATER.match(hw.name)))
    return ScalerSupport(
        native_kernels=False, fp64=False, detects_overflow=known, fused_optimizers=False
    )


def vendor_scaler() -> type[torch.amp.GradScaler]:
    """torch_npu's scaler, which reads the overflow flag of a chip that saturates."""
    import torch_npu

    return torch_npu.npu.amp.GradScaler  # type: ignore[no-any-return]


def synchronize() -> None:
    """Wait for the device's queued work."""
    torch.npu.synchronize()  # type: ignore[attr-defined]


BACKEND = Backend(
    "npu",
    priority=70,
    available=available,
    probe=probe,
    dtypes=dtypes,
    op_lists=op_lists,
    scaler=scaler,
    current_index=current_index,
    vendor_scaler=vendor_scaler,
    synchronize=synchronize,
    contract=1,
)
