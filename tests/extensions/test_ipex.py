"""The CPU's list as IPEX changes it, in a process of its own: run where it is installed."""

from __future__ import annotations

from helpers.observing import observed


def test_ipex_adds_ops_and_changes_none() -> None:
    """Of the 158 names that IPEX has there, two are torchvision's, defined by torchvision alone."""
    assert observed("import intel_extension_for_pytorch\n") == 156
