"""The guard on a real DeepSpeed engine: a region inside it or around it steps aside."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.ranks import Ranks
from torch import Tensor, nn

import amphal
from amphal.errors import EngineWarning
from amphal.integrations import deepspeed as amphal_deepspeed


class Net(nn.Module):
    """A layer that runs in a region of its own, and remembers what autocast was then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seen: list[tuple[bool, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        with amphal.autocast("cpu", "fp16"):
            out: Tensor = self.layer(x)
            self.seen.append((torch.is_autocast_enabled("cpu"), out.dtype))
        return out


def train(by: Any) -> tuple[list[Any], list[str], bool]:
    """What the model saw, the notes, and whether the region around was in force afterwards."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled at first use
    warnings.simplefilter("ignore", amphal.PrecisionWarning)
    plan = amphal.detect("cpu", precision="bf16")
    net = Net()
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = amphal_deepspeed.initialize(
        plan, config=settings, by=by, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1)
    )
    low = torch.bfloat16 if by == "engine" else torch.float32
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with amphal.autocast(plan):
            for _ in range(2):
                loss = engine(torch.ones(2, 8, dtype=low)).float().sum()
                engine.backward(loss)
                engine.step()
            after = torch.is_autocast_enabled("cpu")
    notes = [str(w.message) for w in caught if issubclass(w.category, EngineWarning)]
    return net.seen, notes, after


@pytest.mark.parametrize("by", ["autocast", "engine"])
def test_regions_step_aside(one_rank: Ranks, by: str) -> None:
    """The engine's bf16 holds, not the region's fp16; one note says why."""
    ((seen, notes, after),) = one_rank(train, by, timeout=240)
    assert seen == [(by == "autocast", torch.bfloat16)] * 2
    block = "torch_autocast" if by == "autocast" else "bf16"
    assert len(notes) == 1
    assert notes[0].startswith(f"the DeepSpeed engine ({block}) owns mixed precision")
    assert after
