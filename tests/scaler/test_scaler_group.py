"""Which process groups a scaler accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import amphal
from amphal.errors import ArgumentTypeError


def test_a_destroyed_group_is_refused(tmp_path: Path) -> None:
    """The rule is that of detect() and tune(): a live group that this process is in."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        scaler = amphal.GradScaler("cpu", enabled=True, process_group=group)
        assert scaler.process_group is group
    finally:
        dist.destroy_process_group()
    with pytest.raises(ArgumentTypeError, match="that this process is in"):
        amphal.GradScaler("cpu", enabled=True, process_group=group)
