"""The CPU's list as IPEX changes it, in a process of its own: run where it is installed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap

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


def test_ipex_adds_ops_and_changes_none() -> None:
    """Of the 158 names that IPEX has there, two are torchvision's, defined by torchvision alone."""
    assert observed("import intel_extension_for_pytorch\n") == 156
