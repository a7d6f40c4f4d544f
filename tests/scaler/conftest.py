"""Fixtures of the scaler's tests."""

from __future__ import annotations

from typing import Any

import pytest

from amphal._scaler import gradients as _grads
from amphal._scaler import outcome as _outcome


@pytest.fixture(params=["host", "device"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the scale in host memory, and as if it lay where the host cannot see it."""
    if request.param == "device":
        monkeypatch.setattr(_grads, "host_value", lambda scalar: None)
    return request.param


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the transfers by which the history of unread iterations is read."""
    counts: list[int] = []
    read = _outcome.History.read

    def counted(self: _outcome.History, *args: Any) -> float | None:
        if not self.known:
            counts.append(1)
        return read(self, *args)

    monkeypatch.setattr(_outcome.History, "read", counted)
    return counts
