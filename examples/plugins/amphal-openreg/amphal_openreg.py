"""openreg, PyTorch's reference out-of-tree device, through torch_openreg.

Facts: its kernels are the CPU's, called through torch's CPU fallback (torch_openreg's
``csrc/aten``, torch 2.13). Its own autocast kernels are for mm, asin and binary_cross_entropy
(``csrc/amp/autocast_mode.cpp``); amphal installs the other ops of the lists.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch

from amphal import Hardware, OpLists
from amphal.contract import Availability, Backend, DtypeSupport, ScalerSupport


def available() -> Availability:
    """Whether torch_openreg loads; a process has one slot for devices that are not torch's own."""
    holder = torch._C._get_privateuse1_backend_name()
    if holder not in ("privateuseone", "openreg"):
        # A second extension would abort the process, so look before the import.
        return Availability(
            False,
            f"torch's slot for a third-party device (PrivateUse1) is held by {holder!r} in this "
            "process; use openreg in a process of its own",
        )
    try:
        import torch_openreg  # noqa: F401

        found = torch.openreg.device_count()  # type: ignore[attr-defined]
    except Exception as exc:
        return Availability(False, f"torch_openreg cannot be used: {type(exc).__name__}: {exc}")
    return Availability(found > 0, "" if found else "torch_openreg has no device")


def current_index() -> int | None:
    """The device that "openreg" without an index means."""
    return int(torch.openreg.current_device())  # type: ignore[attr-defined]


def probe(index: int | None) -> Hardware:
    """What there is to know: a CPU that plays two devices."""
    count = torch.openreg.device_count()  # type: ignore[attr-defined]
    if index is not None and index >= count:
        raise IndexError(f"openreg has {count} device(s), and {index} is none of them")
    return Hardware("openreg", "OpenReg", index, os=platform.system().lower())


def dtypes(hw: Hardware) -> Mapping[torch.dtype, DtypeSupport]:
    """It computes in both dtypes; nothing is known of its speed."""
    support = DtypeSupport("native", False, "the reference device is for tests, not for speed")
    return {torch.bfloat16: support, torch.float16: support}


def op_lists(dtype: torch.dtype) -> OpLists:
    """The ops of torch's own lists that a training script meets, the same for both dtypes."""
    return OpLists(
        lower_precision=frozenset(["addmm", "baddbmm", "bmm", "linear", "matmul", "mm", "mv"]),
        fp32=frozenset(["asin", "exp", "layer_norm", "log", "mse_loss", "nll_loss"]),
        fp32_set_opt_dtype=frozenset(["log_softmax.int", "softmax.int", "sum", "sum.dim_IntList"]),
        promote=frozenset(["addcmul", "dot"]),
        banned=frozenset(["binary_cross_entropy"]),
    )


def scaler(hw: Hardware) -> ScalerSupport:
    """The ``_amp_*`` kernels and the fused optimizers run through the CPU fallback."""
    return ScalerSupport(
        native_kernels=True,
        fp64=True,
        detects_overflow=True,
        fused_optimizers=True,
    )


def synchronize() -> None:
    """Wait for the work of the current device."""
    torch.accelerator.synchronize()


BACKEND = Backend(
    "openreg",
    priority=40,
    available=available,
    probe=probe,
    dtypes=dtypes,
    op_lists=op_lists,
    scaler=scaler,
    current_index=current_index,
    synchronize=synchronize,
    contract=1,
)
