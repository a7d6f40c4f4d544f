"""Small models of many architectures with random weights, each with inputs; no downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ALL", "TIMM", "TORCH_ONLY", "TRANSFORMERS", "Block", "UNet"]

Inputs = Callable[[], Any]
Pair = tuple[Callable[[], nn.Module], Inputs]


class Block(nn.Module):
    """A pre-norm transformer block as GPT has it, with ``F.scaled_dot_product_attention``."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result are (batch, tokens, width)."""
        b, t, w = x.shape
        heads = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class UNet(nn.Module):
    """Two levels down, two up, with skips, group norms and transposed convolutions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def stage(a: int, b: int) -> nn.Sequential:
            conv = [nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding="same")]
            return nn.Sequential(conv[0], nn.GroupNorm(4, b), nn.SiLU(), conv[1], nn.PReLU(b))

        self.enter, self.down = stage(3, width), stage(width, 2 * width)
        self.middle = stage(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.back2 = stage(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.back1, self.out = stage(2 * width, width), nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and the result are images whose sides are multiples of four."""
        pool = nn.functional.max_pool2d
        a = self.enter(x)
        b = self.down(pool(a, 2))
        y = self.back2(torch.cat([self.up2(self.middle(pool(b, 2))), b], 1))
        return self.out(self.back1(torch.cat([self.up1(y), a], 1)))


def _ids(tokens: int = 12) -> Tensor:
    return torch.randint(1, 100, (2, tokens))


def _images(side: int = 64) -> Tensor:
    return torch.randn(2, 3, side, side)


def _timm(name: str, **kwargs: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, num_classes=10, **kwargs)
    return model


def _transformers(kind: str, config: str, **kwargs: Any) -> nn.Module:
    import transformers

    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**kwargs))
    return model


def _conv_mixer(width: int = 128, depth: int = 4) -> nn.Module:
    def block() -> nn.Module:
        mix = [nn.Conv2d(width, width, 5, groups=width, padding="same"), nn.GELU()]
        more = [nn.BatchNorm2d(width), nn.Conv2d(width, width, 1), nn.GELU()]
        return nn.Sequential(*mix, *more, nn.BatchNorm2d(width))

    enter = [nn.Conv2d(3, width, 4, 4), nn.GELU(), nn.BatchNorm2d(width)]
    leave = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*enter, *(block() for _ in range(depth)), *leave)


_BERT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 32}
_T5 = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}

TORCH_ONLY: dict[str, Pair] = {
    "nn.Transformer": (
        lambda: nn.Transformer(128, 4, 2, 2, 256, batch_first=True),
        lambda: (torch.randn(2, 7, 128), torch.randn(2, 5, 128)),
    ),
    "nn.LSTM": (lambda: nn.LSTM(64, 128, 2, bidirectional=True), lambda: torch.randn(5, 2, 64)),
    "nn.GRU": (lambda: nn.GRU(64, 128, 2), lambda: torch.randn(5, 2, 64)),
    "UNet": (UNet, _images),
    "ConvMixer": (_conv_mixer, _images),
}
TRANSFORMERS: dict[str, Pair] = {
    "ResNet (transformers)": (
        lambda: _transformers(
            "ResNetModel", "ResNetConfig", embedding_size=32, hidden_sizes=[32, 64], depths=[2, 2]
        ),
        _images,
    ),
    "ViT (transformers)": (
        lambda: _transformers(
            "ViTModel", "ViTConfig", image_size=64, intermediate_size=256, **_BERT
        ),
        _images,
    ),
    "BERT (transformers)": (
        lambda: _transformers(
            "BertModel", "BertConfig", vocab_size=100, intermediate_size=256, **_BERT
        ),
        lambda: {"input_ids": _ids()},
    ),
    "GPT-2 (transformers)": (
        lambda: _transformers("GPT2LMHeadModel", "GPT2Config", vocab_size=100, **_GPT2),
        lambda: {"input_ids": _ids(), "use_cache": False},
    ),
    "T5 (transformers)": (
        lambda: _transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=100,
            decoder_start_token_id=0,
            **_T5,
        ),
        lambda: {"input_ids": _ids(), "labels": _ids()},
    ),
    "Mamba (transformers)": (
        lambda: _transformers(
            "MambaForCausalLM", "MambaConfig", vocab_size=100, hidden_size=128, num_hidden_layers=2
        ),
        lambda: {"input_ids": _ids(), "use_cache": False},
    ),
}
TIMM: dict[str, Pair] = {
    "ResNet-18 (timm)": (lambda: _timm("resnet18"), _images),
    "ViT tiny (timm)": (lambda: _timm("vit_tiny_patch16_224", img_size=64), _images),
    "ConvNeXt (timm)": (lambda: _timm("convnext_atto"), _images),
}
ALL: dict[str, Pair] = {**TORCH_ONLY, **TRANSFORMERS, **TIMM}
"""Name to a function that makes the model and one that makes inputs, with torch's generator."""
