"""The conformance suite: what every backend must do, whoever wrote it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from ..contract import Backend, Hardware, registry
from ._checks_device import DeviceChecks
from ._checks_records import RecordChecks
from ._subject import Subject, make_subject

__all__ = ["BackendConformance"]


class BackendConformance(RecordChecks, DeviceChecks):
    """The suite, to subclass in a test file of a plug-in::

        class TestToy(amphal.testing.BackendConformance):
            backend = "toy"

    Where the device is absent, the checks of casting run on fake tensors of it, and those that
    fake tensors cannot prove are left out. pytest's summary says how each check was proven.
    """

    backend: ClassVar[str | Backend]
    """A registered device type, or a backend to register while the suite runs."""
    hardware: ClassVar[Sequence[Hardware]] = ()
    """Hardware to ask the pure functions about, beyond what this machine and amphal know."""

    @classmethod
    def under_test(cls, config: pytest.Config) -> str | Backend:
        """What to check: the attribute ``backend`` of the class."""
        return cls.backend

    @classmethod
    def absence(cls, config: pytest.Config) -> tuple[str, str]:
        """The device type, and why the device is not here; the reason is empty if it is."""
        backend = cls.under_test(config)
        if isinstance(backend, str):
            backend = registry.get_backend(backend)
        return backend.device_type, registry.availability(backend).reason

    @pytest.fixture
    def subject(self, request: pytest.FixtureRequest) -> Iterator[Subject]:
        """The backend under test; leaves on the report how the check is proven."""
        chosen, source = self.under_test(request.config), ""
        context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(chosen, str):
            source = registry.source_of(chosen)
            chosen = registry.get_backend(chosen)
        else:
            context = registry.overridden(chosen)
        with context:
            subject = make_subject(chosen, source, self.hardware)
            computes = hasattr(DeviceChecks, request.node.originalname)
            how = subject.proof if computes else f"by asking, {len(subject.records)} records"
            request.node.user_properties += [("amphal: device", subject.device_type)]
            request.node.user_properties += [("amphal: proven", how)]
            yield subject
