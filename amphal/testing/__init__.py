"""For tests, of amphal and of plug-ins: check a backend, pretend hardware, a device in pure Python.

``pytest --pyargs amphal.testing --amphal-backend NAME`` checks a backend against the contract;
:class:`BackendConformance` is the same suite to subclass in a test file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._device import install_device
from ._fake import FakeBackend
from ._observe import observe_policy
from ._simulate import simulate

if TYPE_CHECKING:
    from ._conformance import BackendConformance

__all__ = ["BackendConformance", "FakeBackend", "install_device", "observe_policy", "simulate"]


def __getattr__(name: str) -> Any:
    if name == "BackendConformance":  # the only part that needs pytest
        from ._conformance import BackendConformance

        return BackendConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
