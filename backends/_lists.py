"""torch's casting policies as tables: which ops each device's autocast casts, and how.

torch keeps the names in its dispatcher and the policy nowhere that a program can read, so the
policy is declared here and proven by observation (``amphal.testing.observe_policy``). Sources:
``ATen/autocast_mode.h``, which every torch wheel ships, for the lists that cuda, xpu, mtia and maia
share, and what was observed for the two that are written by hand in torch (cpu, mps).

A name without an overload is torch's unnamed overload. Names that the running torch lacks, or that
come from an extension which is not loaded, are dropped by :func:`amphal.op_lists`.
"""

from __future__ import annotations

import sys

import torch

from amphal.contract import OpLists, torch_version

__all__ = ["FROM_BUILDS", "FROM_EXTENSIONS", "cpu", "cuda", "mps", "mtia", "xpu"]


def _ops(names: str) -> frozenset[str]:
    return frozenset(names.split())


_LOWER_PRECISION = _ops(
    """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    """
)

_FP32 = _ops(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp
    """
)

_UPSAMPLE = _ops(
    """
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    """
)

_FP32_SET_OPT_DTYPE = _ops(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
    """
)

_FP32_APPEND_DTYPE = frozenset(["norm.Scalar", "norm.ScalarOpt_dim"])

_PROMOTE = _ops(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """
)

# Overloads by dimension name, which left torch with 2.13.
_NAMED_SET_OPT_DTYPE = _ops(
    """
    prod.dim_Dimname softmax.Dimname log_softmax.Dimname cumprod.dimname cumsum.dimname
    sum.dim_DimnameList
    """
)
_NAMED_APPEND_DTYPE = frozenset(["norm.names_ScalarOpt_dim"])


def _rms_norm() -> frozenset[str]:
    return frozenset(["rms_norm"] if torch_version() >= (2, 12) else [])


def _matrix_sqrth() -> frozenset[str]:
    """An op that came with 2.14, on the lists of CUDA and the CPU and not on the header's."""
    return frozenset(["linalg_matrix_sqrth"] if torch_version() >= (2, 14) else [])


def _header() -> OpLists:
    """The lists of ATen/autocast_mode.h, and the ban that every user of them adds."""
    return OpLists(
        lower_precision=_LOWER_PRECISION,
        fp32=_FP32 | _UPSAMPLE | _rms_norm(),
        fp32_set_opt_dtype=_FP32_SET_OPT_DTYPE | _NAMED_SET_OPT_DTYPE,
        fp32_append_dtype=_FP32_APPEND_DTYPE | _NAMED_APPEND_DTYPE,
        promote=_PROMOTE,
        banned=frozenset(["binary_cross_entropy"]),
    )


# What torchvision puts on the autocast keys that it serves; each was observed on 0.24.
_EXTENSIONS_FP32 = _ops(
    """
    torchvision::deform_conv2d torchvision::nms torchvision::ps_roi_align torchvision::ps_roi_pool
    torchvision::roi_align torchvision::roi_pool
    """
)


def xpu(dtype: torch.dtype) -> OpLists:
    """The policy of XPU autocast: the header's lists."""
    return _header().add(fp32=_EXTENSIONS_FP32)


def mtia(dtype: torch.dtype) -> OpLists:
    """The policy of MTIA autocast (torch 2.7 on): the header's lists."""
    return _header()


_CUDNN = frozenset(["cudnn_convolution", "cudnn_convolution_transpose"])

FROM_BUILDS = frozenset(["_cudnn_rnn", "miopen_rnn"])
"""The names that are on CUDA's key only in a build for CUDA (the first) or for ROCm (the second).

Their kernels are in torch's library for the GPU, and cast to float16 in a bf16 region too. The
second is declared from torch's source.
"""


def cuda(dtype: torch.dtype) -> OpLists:
    """The policy of CUDA and ROCm autocast: the header's lists and the vendors' own ops."""
    return _header().add(
        lower_precision=_CUDNN | FROM_BUILDS, fp32=_EXTENSIONS_FP32 | _matrix_sqrth()
    )


# ops that XPU and CUDA lower and MPS does not have on its list
_NOT_ON_MPS = _ops(
    """
    _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell gru_cell
    linalg_vecdot rnn_relu_cell rnn_tanh_cell conv3d conv_transpose3d.input
    """
)


def mps(dtype: torch.dtype) -> OpLists:
    """The policy of MPS autocast.

    Written by hand in torch: the set_opt_dtype ops are plain fp32, nothing is banned, upsampling,
    the cells and the p-norms are missing. 3-d convolutions came with torch 2.9, the transposed
    one to fp32.
    """
    late = torch_version() >= (2, 9)
    return OpLists(
        lower_precision=(_LOWER_PRECISION - _NOT_ON_MPS)
        | frozenset(["_mps_convolution", *(["conv3d"] if late else [])]),
        fp32=_FP32
        | _FP32_SET_OPT_DTYPE
        | _NAMED_SET_OPT_DTYPE
        | frozenset(["batch_norm", *(["conv_transpose3d.input"] if late else [])]),
        promote=_PROMOTE - {"vdot"},
    )


_CPU_LOWER_PRECISION = _ops(
    """
    _addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm baddbmm bmm
    conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input linalg_vecdot linear matmul mkldnn_rnn_layer mm
    prelu scaled_dot_product_attention
    """
)

_CPU_FP32 = _ops(
    """
    _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d
    binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky_inverse
    cholesky_solve cosine_embedding_loss cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor
    fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn
    fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d
    fractional_max_pool3d geqrf grid_sampler grid_sampler_2d grid_sampler_3d hinge_embedding_loss
    huber_loss inverse kl_div l1_loss linalg_cholesky linalg_cholesky_ex linalg_cond
    linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
    linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank
    linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor
    linalg_matrix_rank.tol_tensor linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv
    linalg_tensorsolve lu_solve margin_ranking_loss max_pool3d max_unpool2d max_unpool3d mse_loss
    multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nanquantile
    nanquantile.scalar nll_loss nll_loss2d orgqr ormqr pinverse poisson_nll_loss polar prod
    prod.dim_int prod.dim_Dimname quantile quantile.scalar reflection_pad1d reflection_pad2d
    replication_pad1d replication_pad2d replication_pad3d smooth_l1_loss soft_margin_loss stft
    stft.center svd trace triangular_solve triplet_margin_loss view_as_complex
    """
)

_CPU_PROMOTE = frozenset(["cat", "index_copy", "index_copy.dimname", "stack"])


def _cpu_fp32() -> frozenset[str]:
    # The two old decompositions left torch, and its list, with 2.14.
    left = frozenset(["cholesky", "qr"] if torch_version() < (2, 14) else [])
    return _CPU_FP32 | _matrix_sqrth() | left


# Intel's extension (IPEX) adds to the CPU's list when it is imported; it changes the policy
# of one of torch's own ops (_addmm_activation, in fp16). Each was observed on IPEX 2.8.
_IPEX_LOWER_PRECISION = _ops(
    """
    _transform_bias_rescale_qkv group_norm torch_ipex::conv_transpose
    torch_ipex::convolution_forward torch_ipex::embedding_bag torch_ipex::ipex_linear
    torch_ipex::ipex_linear_eltwise torch_ipex::ipex_lstm torch_ipex::ipex_lstm_layer
    torch_ipex::ipex_woq_linear torch_ipex::merged_embeddingbag_forward torch_ipex::woq_linear
    torch_ipex::woq_linear_add torch_ipex::woq_linear_add_add torch_ipex::woq_linear_gelu
    torch_ipex::woq_linear_mul torch_ipex::woq_linear_new_gelu torch_ipex::woq_linear_relu
    torch_ipex::woq_linear_silu
    """
)
_IPEX_FP32 = _ops(
    """
    _adaptive_avg_pool3d torch_ipex::batch_score_nms torch_ipex::nms
    torch_ipex::parallel_scale_back_batch torch_ipex::rpn_nms
    """
)
_IPEX_PROMOTE = frozenset(["torch_ipex::ROIAlign_forward", "torch_ipex::interaction_forward"])
# Lowered in a bf16 region; an fp16 region leaves them as they are.
_IPEX_ONLY_BF16 = frozenset(["group_norm", "torch_ipex::ipex_lstm", "torch_ipex::ipex_lstm_layer"])
# On the autocast key with a kernel that casts nothing.
_IPEX_AS_IS = frozenset(["torch_ipex::frozen_batch_norm"])

FROM_EXTENSIONS = (
    _EXTENSIONS_FP32 | _IPEX_LOWER_PRECISION | _IPEX_FP32 | _IPEX_PROMOTE | _IPEX_AS_IS
)
"""The names that are on a key only while the extension that puts them there is loaded."""


def cpu(dtype: torch.dtype) -> OpLists:
    """The policy of CPU autocast: written by hand in torch, and extended by IPEX where loaded."""
    ipex = "intel_extension_for_pytorch" in sys.modules
    # IPEX hands torchvision's RoI alignment to its own.
    taken = frozenset(["torchvision::roi_align"] if ipex else [])
    lower, fp32, as_is = _CPU_LOWER_PRECISION | _IPEX_LOWER_PRECISION, _cpu_fp32(), _IPEX_AS_IS
    if dtype is torch.float16:
        lower, as_is = lower - _IPEX_ONLY_BF16, as_is | _IPEX_ONLY_BF16
        raised = frozenset(["_addmm_activation"] if ipex else [])
        lower, fp32 = lower - raised, fp32 | raised
    return OpLists(
        lower_precision=lower,
        fp32=fp32 | _IPEX_FP32 | (_EXTENSIONS_FP32 - taken),
        promote=_CPU_PROMOTE | _IPEX_PROMOTE | taken,
        as_is=as_is,
    )
