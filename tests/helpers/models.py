"""A small GPT-2 and a small ViT with random weights, and the batches that they train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

STEPS, BATCH = 20, 4

Batch = dict[str, Tensor]


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**size, **dropout, **ends))


def vit() -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    image = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 4}
    return ViTForImageClassification(ViTConfig(intermediate_size=64, **size, **image))


def texts() -> list[Batch]:
    """Counting, from random starts: the next token follows from the last."""
    starts = torch.randint(64, (STEPS * BATCH, 1), generator=torch.Generator().manual_seed(1))
    tokens = (starts + torch.arange(16)) % 64
    return [{"input_ids": row, "labels": row} for row in tokens]


def images() -> list[Batch]:
    """Noise with one of four quarters brighter: which one is the label."""
    rng = torch.Generator().manual_seed(1)
    pixels = torch.randn(STEPS * BATCH, 1, 8, 8, generator=rng)
    labels = torch.randint(4, (STEPS * BATCH,), generator=rng)
    for image, label in zip(pixels, labels.tolist(), strict=True):
        image[0, 4 * (label // 2) :, 4 * (label % 2) :][:4, :4] += 2
    return [{"pixel_values": p, "labels": y} for p, y in zip(pixels, labels, strict=True)]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Batch]]]] = {
    "GPT-2": (gpt2, texts),
    "ViT": (vit, images),
}


def collate(rows: list[Batch]) -> Batch:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def batches(name: str) -> list[Batch]:
    rows = MODELS[name][1]()
    return [collate(rows[i : i + BATCH]) for i in range(0, len(rows), BATCH)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)


def made(name: str) -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
    """A fresh model, its optimizer and its batches."""
    model = MODELS[name][0]()
    return model, optimizer_of(model), batches(name)
