"""The pytest option ``--amphal-backend NAME``, and the summary of how each check was proven.

pytest reads options before it looks into a package, so this plug-in is a module of its own; it
imports nothing, torch and amphal included.
"""

from __future__ import annotations

import pytest

DEVICE, PROVEN = "amphal: device", "amphal: proven"
"""The properties that a check of the suite leaves on its report: of which device, and how."""

_absent = pytest.StashKey[dict[str, list[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the backend to check."""
    parser.getgroup("amphal").addoption(
        "--amphal-backend",
        metavar="NAME",
        help="the backend that `pytest --pyargs amphal.testing` checks: its device type",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the checks that need a device which is not here; the summary names them."""
    absent = config.stash.setdefault(_absent, {})
    left_out = []
    for item in items:
        suite = getattr(item, "cls", None)
        if getattr(getattr(item, "obj", None), "needs_device", False):
            device, reason = suite.absence(config)
            if reason:
                left_out.append(item)
                absent.setdefault(f"{device}, not proven: {reason}", []).append(item.name)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the checks of the conformance suite by how they were proven."""
    proven: dict[str, list[str]] = dict(terminalreporter.config.stash.get(_absent, {}))
    for outcome in ("passed", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            left = dict(report.user_properties)
            if PROVEN not in left:
                continue
            how = f"{left[DEVICE]}, {left[PROVEN]}"
            if outcome == "skipped":
                why = report.longrepr[2].removeprefix("Skipped: ")
                how = f"{left[DEVICE]}, not proven: {why}"
            proven.setdefault(how, []).append(report.nodeid.rpartition("::")[2])
    failed = sum(
        DEVICE in dict(getattr(report, "user_properties", ()))
        for outcome in ("failed", "error")
        for report in terminalreporter.stats.get(outcome, ())
    )
    if proven or failed:
        terminalreporter.section("amphal: how each check was proven")
        left_out = 0
        for how, checks in sorted(proven.items()):
            left_out += len(checks) if "not proven" in how else 0
            terminalreporter.write_line(f"{how}:")
            terminalreporter.write_line(
                f"    {', '.join(check.removeprefix('test_') for check in checks)}"
            )
        total = sum(map(len, proven.values()))
        count = f"{total - left_out} proven, {left_out} not proven"
        terminalreporter.write_line(f"{count}, {failed} failed" if failed else count)
