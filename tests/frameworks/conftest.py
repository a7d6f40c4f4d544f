"""Processes in a gloo group, as the tests of distributed training have them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers.ranks import Ranks

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
