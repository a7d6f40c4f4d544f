"""``pytest --pyargs amphal.testing --amphal-backend NAME``: the suite for one backend."""

from __future__ import annotations

import pytest

import amphal
from amphal.testing import BackendConformance


class TestBackend(BackendConformance):
    """The backend that the option names, from the registry."""

    @pytest.fixture
    def amphal_backend(self, request: pytest.FixtureRequest) -> str:
        """The device type after ``--amphal-backend``."""
        name = request.config.getoption("--amphal-backend")
        if not name:
            known = ", ".join(amphal.registered_backends())
            pytest.exit(f"say which backend to check: --amphal-backend NAME, of {known}", 4)
        try:
            amphal.get_backend(name)
        except amphal.AmphalError as error:
            pytest.exit(f"--amphal-backend {name}: {error}", 4)
        return str(name)
