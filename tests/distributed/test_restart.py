"""A rank that is killed in the middle, and the run that goes on from the checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import Ranks
from helpers.training import Course, made, one_step, overflows
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

STEPS, EVERY, DIES = 24, 5, 13
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def train(kind: str, planted: dict[int, int], path: str, dies: bool) -> Course:
    """Train to the last step from the checkpoint, if there is one; perhaps rank 1 dies before."""
    course, (net, opt, scaler, plan) = Course(), made(kind, group=True)
    rank, start = torch.distributed.get_rank(), 0
    if os.path.exists(path):
        state = torch.load(path, weights_only=True)
        set_state_dict(
            net, opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            options=WHOLE,
        )  # fmt: skip
        scaler.load_state_dict(state["scaler"])
        start = state["step"]
    for step in range(start, STEPS):
        if dies and step == DIES and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        one_step(kind, 2, step, planted, course, net, opt, scaler, plan, where="gradient")
        if (step + 1) % EVERY == 0:
            save(path, step + 1, net, opt, scaler, rank)
    course.state = scaler.state_dict()
    return course


def save(path: str, step: int, net: Any, opt: Any, scaler: Any, rank: int) -> None:
    model, optimizer = get_state_dict(net, opt, options=WHOLE)  # a collective
    state = {"model": model, "optimizer": optimizer, "scaler": scaler.state_dict(), "step": step}
    if rank == 0:
        torch.save(state, path)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_goes_on_after_a_rank_was_killed(tmp_path: Path, kind: str, two_ranks: Ranks) -> None:
    """Losses, skips, scales and counters after the restart are those of an undisturbed run."""
    planted = overflows(STEPS, 2)
    assert min(planted) < 10 < max(planted)
    through = two_ranks(train, kind, planted, str(tmp_path / "through.pt"), False)
    path = str(tmp_path / "checkpoint.pt")
    with pytest.raises(AssertionError, match="rank 1: died, exit code -9"):
        two_ranks(train, kind, planted, path, True)
    assert torch.load(path, weights_only=True)["step"] == 10
    for whole, rest in zip(through, two_ranks(train, kind, planted, path, False), strict=True):
        assert rest.losses == whole.losses[10:]
        assert rest.scales == whole.scales[10:]
        assert rest.skips == [step for step in whole.skips if step >= 10]
        assert rest.state == whole.state
        assert rest.state["amphal"]["skipped"] == len(planted)
