"""What torch's own modules do with their parameters, where it is known without running them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from . import _compat

__all__ = ["FUSED_LAYER_CASTS", "dtype_picks_path", "unknown_consumer"]

_ATTENTION = frozenset(["_native_multi_head_attention"])
_FEED_FORWARD = frozenset(["_addmm_activation", "addmm"])

FUSED_LAYER_CASTS = {
    "_transformer_encoder_layer_fwd": {
        **dict.fromkeys(["qkv_weight", "qkv_bias", "proj_weight", "proj_bias"], _ATTENTION),
        **dict.fromkeys(
            ["ffn_weight_1", "ffn_bias_1", "ffn_weight_2", "ffn_bias_2"], _FEED_FORWARD
        ),
    }
}
"""Ops whose kernels are made of ops that autocast casts: each argument with those that take it."""

_OWN: dict[type[nn.Module], frozenset[str]] = {
    nn.Linear: frozenset(["linear"]),
    nn.modules.linear.NonDynamicallyQuantizableLinear: frozenset(["linear"]),
    nn.Conv1d: frozenset(["conv1d"]),
    nn.Conv2d: frozenset(["conv2d"]),
    nn.Conv3d: frozenset(["conv3d"]),
    nn.ConvTranspose1d: frozenset(["conv_transpose1d"]),
    nn.ConvTranspose2d: frozenset(["conv_transpose2d.input"]),
    nn.ConvTranspose3d: frozenset(["conv_transpose3d.input"]),
    nn.PReLU: frozenset(["prelu"]),
    nn.MultiheadAttention: frozenset(["linear"]),
}
_NOT_CAST = frozenset(["bias_k", "bias_v"])
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_CALLERS = frozenset(
    [
        nn.Sequential,
        nn.ModuleList,
        nn.ModuleDict,
        nn.MultiheadAttention,
        nn.Transformer,
        nn.TransformerEncoder,
        nn.TransformerEncoderLayer,
        nn.TransformerDecoder,
        nn.TransformerDecoderLayer,
    ]
)
_ASK = "give example_inputs"


def unknown_consumer(model: nn.Module, names: tuple[str, ...], lowered: frozenset[str]) -> str:
    """Why it isn't known that only casts read this parameter; empty if it is.

    It is where torch's own modules hold it and lie, up to the model, in nothing but torch's own:
    code of anybody else might read ``self.linear.weight`` itself.
    """
    for name in names:
        path, _, local = name.rpartition(".")
        owner = model.get_submodule(path)
        if type(owner) not in _OWN or local in _NOT_CAST:
            return f"it is not known to be cast in {type(owner).__name__}: {_ASK}"
        chain = [owner, *_above(model, path)]
        for module in chain[1:]:
            if type(module) not in _CALLERS:
                return f"{type(module).__name__} might read it as well: {_ASK}"
        if any(_is_changed(module) for module in chain):
            return f"a hook or a replaced forward might read it as well: {_ASK}"
        needed = _OWN[type(owner)]
        if any(isinstance(module, _FUSED) for module in chain) and not _compat.fused_paths_off():
            needed = needed | _ATTENTION | _FEED_FORWARD
        if not needed <= lowered:
            return f"autocast does not cast for {', '.join(sorted(needed - lowered))}"
    return ""


def _above(model: nn.Module, path: str) -> Iterator[nn.Module]:
    while path:
        path = path.rpartition(".")[0]
        yield model.get_submodule(path)


def _is_changed(module: nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return "forward" in vars(module) or any(not hasattr(h, "amphal_guard") for h in hooks)


def dtype_picks_path(model: nn.Module) -> dict[int, str]:
    """Parameters whose own dtype decides between two kernels with other results, by ``id``.

    ``nn.MultiheadAttention`` takes its fused kernel where the input has the dtype of the packed
    weights. Within a layer of ``nn.TransformerEncoder`` the layer's own fused kernel comes first.
    """
    if _compat.fused_paths_off():
        return {}
    covered = {
        id(layer.self_attn)
        for layer in model.modules()
        if type(layer) is nn.TransformerEncoderLayer and _always_fused(layer)
    }
    # Its keys are the memory, and the fused kernel is for attention of an input to itself.
    covered |= {
        id(layer.multihead_attn)
        for layer in model.modules()
        if type(layer) is nn.TransformerDecoderLayer
    }
    reason = "its dtype decides whether nn.MultiheadAttention takes its fused kernel"
    return {
        id(p): reason
        for m in model.modules()
        if isinstance(m, nn.MultiheadAttention) and id(m) not in covered and _can_fuse(m)
        for p in (m.in_proj_weight, m.in_proj_bias)
        if p is not None
    }


def _can_fuse(attention: nn.MultiheadAttention) -> bool:
    return (
        type(attention).forward is nn.MultiheadAttention.forward
        and attention.batch_first
        and attention.num_heads % 2 == 0
        and attention._qkv_same_embed_dim
        and attention.bias_k is None
        and not attention.add_zero_attn
        and attention.in_proj_weight is not None
    )


def _always_fused(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether in eval mode every batched input takes the layer's own fused kernel."""
    return (
        layer.self_attn.in_proj_bias is not None
        and bool(layer.activation_relu_or_gelu)
        and layer.norm1.eps == layer.norm2.eps
        and not any(p.requires_grad for p in layer.parameters())
        and not any(_is_changed(m) or m._forward_pre_hooks for m in layer.modules())
    )
