"""The models of the benchmarks, from bound by overhead to bound by arithmetic."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from gpt import GPT  # the model of examples/train.py


@dataclass(frozen=True)
class Workload:
    """A model, its batch and its loss."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _convnet() -> nn.Module:
    def stage(inputs: int, outputs: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, 3, 2, 1)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    stages = (stage(3, 32), stage(32, 64), stage(64, 128), stage(128, 256))
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def _bytes(batch: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (batch, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            "MLP of two layers, batch 32",
            _mlp,
            lambda: (torch.randn(32, 64), torch.randint(10, (32,))),
            nn.functional.cross_entropy,
        ),
        Workload(
            "convnet, 16 images of 64 x 64",
            _convnet,
            lambda: (torch.randn(16, 3, 64, 64), torch.randint(10, (16,))),
            nn.functional.cross_entropy,
        ),
        Workload(
            "GPT, 0.8M parameters, 8 x 64",
            lambda: GPT(128, 4, 64),
            lambda: _bytes(8, 64),
            _token_loss,
        ),
        Workload(
            "GPT, 10M parameters, 8 x 128",
            lambda: GPT(384, 6, 128),
            lambda: _bytes(8, 128),
            _token_loss,
        ),
    )
}
