"""What torch's own modules do with their parameters, where it is known without running them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .._torch import private

__all__ = [
    "FUSED_LAYER_CASTS",
    "FusedLayer",
    "dtype_picks_path",
    "fused_layers",
    "unknown_consumer",
]

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


def foreign(model: nn.Module) -> str:
    """What in the model is not torch's own, and may hold a reference to any parameter; or ""."""
    for module in model.modules():
        name = type(module).__name__
        if not type(module).__module__.startswith("torch."):
            return f"{name} might read it as well: {_ASK}"
        if not all(_is_ours(hook) for hook in _hooks(module)):
            return f"a hook of {name} might read it as well: {_ASK}"
        if not _is_ours(vars(module).get("forward")):
            return f"a replaced forward of {name} might read it as well: {_ASK}"
        activation = vars(module).get("activation", "")
        if not isinstance(activation, str) and activation not in (F.relu, F.gelu):
            return f"the activation function of {name} might read it as well: {_ASK}"
    return ""


def _hooks(module: nn.Module) -> Iterator[Any]:
    for hooks in (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ):
        yield from hooks.values()


def _is_ours(function: Any) -> bool:
    """Whether a function, or an object that is called, is torch's or amphal's; None is."""
    module = getattr(function, "__module__", None) or type(function).__module__
    return function is None or module.split(".")[0] in ("torch", "amphal")


def unknown_consumer(model: nn.Module, names: tuple[str, ...], lowered: frozenset[str]) -> str:
    """Why it isn't known that only casts read this parameter; empty if it is.

    It is where torch's own modules hold it and lie, up to the model, in nothing but torch's own:
    code of anybody else might read ``self.linear.weight`` itself.
    """
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        return f"what calls the modules of this {type(model).__name__} might read it: {_ASK}"
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
        if any(isinstance(module, _FUSED) for module in chain) and not private.fused_paths_off():
            needed = needed | _ATTENTION | _FEED_FORWARD
        if not needed <= lowered:
            return f"autocast does not cast for {', '.join(sorted(needed - lowered))}"
    return ""


def _above(model: nn.Module, path: str) -> Iterator[nn.Module]:
    while path:
        path = path.rpartition(".")[0]
        yield model.get_submodule(path)


def _is_changed(module: nn.Module) -> bool:
    return "forward" in vars(module) or any(not hasattr(h, "amphal_guard") for h in _hooks(module))


def dtype_picks_path(model: nn.Module) -> dict[int, str]:
    """Parameters whose own dtype decides between two kernels with other results, by ``id``.

    ``nn.MultiheadAttention`` takes its fused kernel where the input has the dtype of the packed
    weights. Within a layer of ``nn.TransformerEncoder`` the layer's own fused kernel comes first.
    """
    if private.fused_paths_off():
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


class FusedLayer:
    """A layer whose packed weights are stored low because its own fused kernel takes them.

    Off that kernel, its attention would look at their dtype to choose between two others.
    """

    def __init__(self, layer: nn.TransformerEncoderLayer, stored: Mapping[int, Collection[str]]):
        self.layer = layer
        inside = list(layer.modules())
        self._hooks = tuple(h for m in inside for h in (m._forward_hooks, m._forward_pre_hooks))
        # What is stored low may not train in any case.
        self._others = tuple(
            (m._parameters, local)
            for m in inside
            for local in m._parameters
            if local not in stored.get(id(m), ())
        )

    def off(self) -> str:
        """What keeps the layer off its kernel and not its attention; empty if nothing does."""
        layer = self.layer
        if layer.training and not layer.self_attn.training:
            return "an encoder layer trains and its attention does not"
        if any(self._hooks):
            return "a hook was put on an encoder layer"
        if torch.is_grad_enabled():
            for params, local in self._others:
                param = params.get(local)
                if param is not None and param.requires_grad:
                    return f"{local} of an encoder layer was unfrozen"
        return ""


def fused_layers(model: nn.Module, stored: Mapping[int, Collection[str]]) -> list[FusedLayer]:
    """The layers of which packed attention weights are stored, by the ``id`` of their module."""
    return [
        FusedLayer(layer, stored)
        for layer in model.modules()
        if type(layer) is nn.TransformerEncoderLayer
        and id(layer.self_attn) in stored
        and any(local.startswith("in_proj") for local in stored[id(layer.self_attn)])
        and _can_fuse(layer.self_attn)
    ]
