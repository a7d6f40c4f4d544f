"""``pytest --pyargs amphal.testing --amphal-backend NAME``: the suite for one backend."""

from __future__ import annotations

import pytest

from amphal.contract import get_backend, registered_backends
from amphal.errors import AmphalError
from amphal.testing import BackendConformance


class TestBackend(BackendConformance):
    """The backend that the option names, from the registry."""

    @classmethod
    def under_test(cls, config: pytest.Config) -> str:
        """The device type after ``--amphal-backend``."""
        name = config.getoption("--amphal-backend")
        if not name:
            known = ", ".join(registered_backends())
            raise pytest.UsageError(f"say which backend: --amphal-backend NAME, one of {known}")
        try:
            get_backend(name)
        except AmphalError as error:
            raise pytest.UsageError(f"--amphal-backend {name}: {error}") from None
        return str(name)
