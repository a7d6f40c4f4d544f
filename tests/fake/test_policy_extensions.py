"""The CPU's list as extensions change it: each in its own process, where it is installed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
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
    # From elsewhere: in a checkout, ./amphal would hide the installed package.
    command, elsewhere = [sys.executable, "-c", code], tempfile.gettempdir()
    result = subprocess.run(command, capture_output=True, text=True, cwd=elsewhere)
    assert "observed as declared" in result.stdout, result.stdout + result.stderr
    return int(result.stdout.split()[-4])


def test_without_an_extension() -> None:
    """The list is the one of torch alone: 127 ops in 2.13, 129 with those by dimension name."""
    assert observed("") in (127, 129)
