"""The model and the text of train.py: a small GPT, and the standard library's own sources."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes
HEAD_SIZE = 32


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by ordinary ops, for a device whose fused attention is not usable."""
    length = q.shape[-2]
    future = torch.ones(length, length, device=q.device).triu(1) > 0
    scores = (q @ k.transpose(-2, -1) * HEAD_SIZE**-0.5).masked_fill(future, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTION = {"fused": fused_attention, "plain": plain_attention}


class Block(nn.Module):
    def __init__(self, width: int, attention: str) -> None:
        super().__init__()
        self.attend = ATTENTION[attention]
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, -1, HEAD_SIZE)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = self.attend(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Next-byte logits of shape (batch, length, 256) for bytes of shape (batch, length)."""

    def __init__(self, width: int, layers: int, context: int, attention: str = "fused") -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.token(x) + self.position(positions))))


def corpus() -> tuple[Tensor, Tensor]:
    """The standard library's modules as bytes: each tenth file to validate, the rest to train."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [file.read_bytes() for file in sorted(folder.glob("*.py"))]
    if len(texts) < 10:
        raise FileNotFoundError(f"no sources of the standard library to train on in {folder}")
    held_out = b"".join(texts[::10])
    training = b"".join(text for i, text in enumerate(texts) if i % 10)
    return (
        torch.frombuffer(bytearray(training), dtype=torch.uint8),
        torch.frombuffer(bytearray(held_out), dtype=torch.uint8),
    )
