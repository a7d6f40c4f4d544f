"""The two groups of processes that the tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.ranks import Ranks


def _group(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes in one gloo group."""
    yield from _group(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four processes in one gloo group."""
    yield from _group(4)
