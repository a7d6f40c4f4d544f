"""The CPU's list as extensions change it: each in its own process, where it is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.fake

OBSERVE = """
    import amphal
    from amphal.errors import OpPolicyError
    from amphal.testing import observe_policy

    lists = amphal.op_lists("cpu")
    assert lists.unclassified == frozenset(), lists.unclassified
    different = {}
    for op, policy in lists:
        observed = observe_policy("cpu", op)
        if observed != policy:
            different[op] = (policy, observed)
    assert different == {}, different
    print(len(lists), "observed as declared")
"""


def observed(imports: str) -> int:
    code = imports + textwrap.dedent(OBSERVE)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "observed as declared" in result.stdout, result.stdout + result.stderr
    return int(result.stdout.split()[-4])


def test_without_an_extension() -> None:
    """The list is the one of torch alone: 127 ops in 2.13, 129 with those by dimension name."""
    assert observed("") in (127, 129)


@pytest.mark.skipif(
    importlib.util.find_spec("intel_extension_for_pytorch") is None,
    reason="runs in the environment that has IPEX",
)
def test_ipex_adds_ops_and_changes_none() -> None:
    """Of the 158 names that IPEX has there, two are torchvision's, defined by torchvision alone."""
    assert observed("import intel_extension_for_pytorch\n") == 156


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="runs in an environment that has torchvision",
)
def test_torchvision_adds_two_ops() -> None:
    """Non-maximum suppression and RoI alignment run in float32 on the CPU."""
    assert observed("import torchvision\n") == observed("") + 2
