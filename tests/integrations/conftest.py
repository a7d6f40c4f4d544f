"""Processes in a gloo group, as the tests of distributed training have them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from ranks import Ranks

os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported, in the ranks too
os.environ["ACCELERATE_USE_CPU"] = "true"


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    """One process, a group of its own: DeepSpeed cannot do without one."""
    ranks = Ranks(1)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes in one group."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()
