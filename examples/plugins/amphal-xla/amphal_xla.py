"""XLA devices, through torch_xla. Run on XLA's CPU client; TPU is from public facts.

Facts: TPUs compute in bf16, and torch's TPU interface has no fp16 and no float64 (docs.pytorch.org
xla amp, torch 2.13); the op lists are torch_xla 2.9's, read from its autocast kernels and observed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

import torch

from amphal import Hardware, OpLists
from amphal.contract import Availability, Backend, DtypeSupport, ScalerSupport

_LOWER = """
    addbmm addmm baddbmm bmm conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding
    conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input einsum linear matmul
    max_pool2d mm prelu relu
"""
_FP32 = """
    _softmax batch_norm binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky
    cholesky_inverse cholesky_solve cosine_embedding_loss cross_entropy_loss ctc_loss.IntList
    ctc_loss.Tensor hinge_embedding_loss inverse kl_div l1_loss linalg_inv_ex linalg_svd
    log_softmax.Dimname log_softmax.int margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss multilabel_margin_loss_forward nll_loss nll_loss2d pow.Tensor_Scalar
    prod prod.dim_Dimname prod.dim_int qr reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d replication_pad3d smooth_l1_loss soft_margin_loss softmax.Dimname softmax.int
    svd trace triangular_solve triplet_margin_loss
"""
_PROMOTE = "cat index_copy index_copy.dimname stack"


def available() -> Availability:
    """Whether torch_xla loads and its runtime finds a device. This starts the runtime."""
    try:
        import torch_xla
        import torch_xla.runtime

        found = torch_xla.device_count()
    except Exception as exc:  # no package, another torch than its own, or no device under it
        client = os.environ.get("PJRT_DEVICE", "")
        hint = f"PJRT_DEVICE={client}" if client else "PJRT_DEVICE is not set; CPU always works"
        why = f"torch_xla cannot be used: {type(exc).__name__}: {exc} ({hint})"
        return Availability(False, why)
    return Availability(found > 0, "" if found else "torch_xla's runtime has no device")


def current_index() -> int | None:
    """The device that "xla" without an index means."""
    import torch_xla

    return torch_xla.device().index


def probe(index: int | None) -> Hardware:
    """The runtime's client ("CPU", "TPU", "NEURON" …) as the architecture."""
    import torch_xla
    import torch_xla.runtime

    count = torch_xla.device_count()
    if index is not None and index >= count:
        raise IndexError(f"torch_xla's runtime has {count} device(s), and {index} is none of them")
    client = torch_xla.runtime.device_type()
    return Hardware(
        "xla",
        f"XLA on {client}",
        index=index,
        vendor="openxla",
        architecture=client.lower(),
        os=platform.system().lower(),
    )


def dtypes(hw: Hardware) -> Mapping[torch.dtype, DtypeSupport]:
    """By the client; what is not known is used only if you name it."""
    if hw.architecture == "tpu":
        bf16 = DtypeSupport("native", True, "TPUs multiply bf16")
        fp16 = DtypeSupport("absent", False, "TPUs have no fp16")
    elif hw.architecture == "cpu":
        why = "XLA's CPU client is for tests: it is not faster in it than in fp32"
        bf16 = fp16 = DtypeSupport("emulated", False, why)
    else:
        why = f"this plug-in has no facts about the client {hw.architecture or 'in use'}"
        bf16 = fp16 = DtypeSupport("emulated", False, why)
    return {torch.bfloat16: bf16, torch.float16: fp16}


def op_lists(dtype: torch.dtype) -> OpLists:
    """torch_xla's own autocast kernels, the same for both dtypes."""
    return OpLists(
        lower_precision=frozenset(_LOWER.split()),
        fp32=frozenset(_FP32.split()),
        promote=frozenset(_PROMOTE.split()),
    )


def scaler(hw: Hardware) -> ScalerSupport:
    """torch_xla has the ``_amp_*`` kernels; torch has no fused optimizer for XLA."""
    return ScalerSupport(
        native_kernels=True,
        fp64=hw.architecture == "cpu",
        detects_overflow=True,
        fused_optimizers=False,
    )


def synchronize() -> None:
    """Run what was traced so far, and wait for it."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    torch_xla.sync()
    xm.wait_device_ops()


BACKEND = Backend(
    "xla",
    priority=60,
    available=available,
    probe=probe,
    dtypes=dtypes,
    op_lists=op_lists,
    scaler=scaler,
    current_index=current_index,
    synchronize=synchronize,
    contract=1,
)
