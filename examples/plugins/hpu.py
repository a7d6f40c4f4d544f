"""Intel Gaudi, through habana_frameworks. NOT RUN ON HARDWARE: written from public facts.

Facts: bf16 on every generation and no fp16 on the first are Hugging Face's (perf_train_gaudi,
accelerate); the op lists, float64 and fp16 on later ones are docs.habana.ai (mixed precision,
support matrix, operators). The page lists ops by their Python names, given here as aten names; its
list of promoted ops, and what LOWER_LIST and FP32_LIST in the environment change, are left out.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from amphal import Hardware, OpLists
from amphal.contract import Availability, Backend, DtypeSupport, ScalerSupport

_LOWER = """
    addbmm addmm baddbmm batch_norm bmm conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input dot dropout feature_dropout group_norm
    instance_norm layer_norm leaky_relu linear log_softmax.int matmul mean mm mul.Tensor mv
    scaled_dot_product_attention softmax.int
"""
_FP32 = """
    acos addcdiv asin atan2 bilinear binary_cross_entropy binary_cross_entropy_with_logits cdist
    cosh cosine_embedding_loss cosine_similarity cross_entropy_loss dist div.Tensor
    divide.Tensor embedding embedding_bag erfinv exp expm1 hinge_embedding_loss huber_loss
    kl_div l1_loss log log10 log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss nll_loss pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar
    pow.Tensor_Tensor reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan
    topk triplet_margin_loss true_divide.Tensor
"""


def _hpu() -> Any:
    import habana_frameworks.torch.hpu as hpu

    return hpu


def available() -> Availability:
    """Whether Gaudi's software loads and finds a device."""
    try:
        ok = _hpu().is_available()
    except Exception as exc:  # no package, or no driver under it
        why = f"habana_frameworks cannot be used: {type(exc).__name__}: {exc}"
        return Availability(False, why)
    return Availability(ok, "" if ok else "hpu.is_available() is False: does hl-smi list a device?")


def current_index() -> int:
    """The device that "hpu" without an index means."""
    return _hpu().current_device()  # type: ignore[no-any-return]


def probe(index: int | None) -> Hardware:
    """The name of the generation: "GAUDI", "GAUDI2" or "GAUDI3"."""
    count = _hpu().device_count()
    if index is not None and index >= count:
        raise IndexError(f"there are {count} hpu devices, and {index} is none of them")
    name = _hpu().get_device_name()
    return Hardware("hpu", name, index, vendor="intel", os=platform.system().lower())


def dtypes(hw: Hardware) -> Mapping[torch.dtype, DtypeSupport]:
    """bf16 everywhere; fp16 only if you name it, and not on the first generation."""
    if hw.name.upper() == "GAUDI":
        fp16 = DtypeSupport("absent", False, "the first Gaudi has no fp16")
    else:
        why = "the operator table lists fp16, and Gaudi's maintainers call it not fully supported"
        fp16 = DtypeSupport("native", False, why)
    bf16 = DtypeSupport("native", True, "every Gaudi multiplies bf16 and trains in it by default")
    return {torch.bfloat16: bf16, torch.float16: fp16}


def op_lists(dtype: torch.dtype) -> OpLists:
    """The documented lists; an op on both is lowered, as the page says."""
    lower = frozenset(_LOWER.split())
    return OpLists(lower_precision=lower, fp32=frozenset(_FP32.split()) - lower)


def scaler(hw: Hardware) -> ScalerSupport:
    """No float64; the portable path of amphal's scaler needs none of the vendor's kernels.

    That an overflow gives inf is assumed; the conformance suite checks it on a device.
    """
    return ScalerSupport(
        native_kernels=False, fp64=False, detects_overflow=True, fused_optimizers=False
    )


def synchronize() -> None:
    """Wait for the device's queued work."""
    _hpu().synchronize()


BACKEND = Backend(
    "hpu",
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
