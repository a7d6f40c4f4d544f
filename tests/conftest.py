"""What every test needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import amphal
from amphal import _environment
from amphal._torch import float16_regions
from amphal.contract import registry


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """amphal keeps the variables that it has read: those of one test are not the next one's."""
    yield
    # Later than monkeypatch, which is set up after this and so is undone before.
    kept = _environment._values
    if any(value != os.environ.get(name, "").strip() for name, value in kept.items()):
        amphal.detect.cache_clear()


@pytest.fixture(autouse=True)
def _own_regions() -> None:
    """A float16 region of one test turns no scaler of the next one on."""
    float16_regions.clear()


@pytest.fixture(autouse=True)
def _own_backends() -> Iterator[None]:
    """A backend that a test registers, or puts in the place of another, is gone after it."""
    before = registry._rows
    yield
    if before is not None and registry._rows is not before:
        changed = {name for name, row in before.items() if registry._table().get(name) is not row}
        added = registry._table().keys() - before.keys()
        for name in changed | added:
            registry._put(name, before.get(name))
        if changed | added:
            registry._changed()
