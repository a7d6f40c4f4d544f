"""The CPU's whole list held against observation, in a process with or without an extension."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap

PROGRAM = """
    import amphal
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
    """How many ops the list has, each of the policy declared, after these import lines."""
    code = imports + textwrap.dedent(PROGRAM)
    # From elsewhere: in a checkout, ./amphal would hide the installed package.
    command, elsewhere = [sys.executable, "-c", code], tempfile.gettempdir()
    result = subprocess.run(command, capture_output=True, text=True, cwd=elsewhere)
    assert "observed as declared" in result.stdout, result.stdout + result.stderr
    return int(result.stdout.split()[-4])
