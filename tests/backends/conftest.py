"""Backends are asked about machines that these tests make up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import amphal


@pytest.fixture(autouse=True)
def _no_remembered_answers() -> Iterator[None]:
    """No plan of an imagined machine outlives its test."""
    amphal.detect.cache_clear()
    yield
    amphal.detect.cache_clear()
