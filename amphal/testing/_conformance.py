"""The conformance suite: what every backend must do, whoever wrote it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from .. import _registry
from .._backend import Backend, Hardware
from ._checks_device import DeviceChecks
from ._checks_records import RecordChecks
from ._subject import Subject, make_subject

__all__ = ["BackendConformance"]


class BackendConformance(RecordChecks, DeviceChecks):
    """The suite, to subclass in a test file of a plug-in::

        class TestToy(amphal.testing.BackendConformance):
            backend = "toy"

    Where the device is absent, the checks that compute run on fake tensors of it; those that fake
    tensors cannot prove are skipped with the reason. pytest's summary says how each was proven.
    """

    backend: ClassVar[str | Backend]
    """A registered device type, or a backend to register while the suite runs."""
    hardware: ClassVar[Sequence[Hardware]] = ()
    """Hardware to ask the pure functions about, beyond what this machine and amphal know."""

    @pytest.fixture
    def amphal_backend(self) -> str | Backend:
        """What to check: the attribute ``backend`` of the class."""
        return self.backend

    @pytest.fixture
    def subject(
        self, request: pytest.FixtureRequest, amphal_backend: str | Backend
    ) -> Iterator[Subject]:
        """The backend under test; leaves on the report how the check is proven."""
        context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        source = ""
        if isinstance(amphal_backend, Backend):
            backend = amphal_backend
            context = _registry.overridden(backend)
        else:
            backend = _registry.get_backend(amphal_backend)
            source = _registry.registered_backends()[amphal_backend].source
        with context:
            subject = make_subject(backend, source, self.hardware)
            computes = hasattr(DeviceChecks, request.node.originalname)
            how = subject.proof if computes else f"by asking, {len(subject.records)} records"
            request.node.user_properties.append(("amphal: proven", how))
            yield subject
