"""The CPU's list in a process with no extension; tests/extensions has those with one."""

from __future__ import annotations

import pytest
from helpers.observing import observed

from amphal.contract.records import torch_version

pytestmark = pytest.mark.fake


def test_without_an_extension() -> None:
    """The list is the one of torch alone.

    127 ops; before 2.13 two more, by dimension name, and from 2.14 two gone and one new.
    """
    version = torch_version()
    assert observed("") == (126 if version >= (2, 14) else 127 if version >= (2, 13) else 129)
