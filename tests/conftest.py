"""What every test needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import amphal
from amphal import _environment


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """amphal keeps the variables that it has read: those of one test are not the next one's."""
    yield
    # Later than monkeypatch, which is set up after this and so is undone before.
    kept = _environment._values
    if any(value != os.environ.get(name, "").strip() for name, value in kept.items()):
        amphal.detect.cache_clear()
