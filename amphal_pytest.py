"""The pytest option ``--amphal-backend NAME``, and the summary of how each check was proven.

pytest reads options before it looks into a package, so this plug-in is a module of its own; it
imports nothing, torch and amphal included.
"""

from __future__ import annotations

PROVEN = "amphal: proven"
"""The property that a check of the suite leaves on its report: how it was proven."""


def pytest_addoption(parser) -> None:
    """Add the option that names the backend to check."""
    parser.getgroup("amphal").addoption(
        "--amphal-backend",
        metavar="NAME",
        help="the backend that `pytest --pyargs amphal.testing` checks: its device type",
    )


def pytest_terminal_summary(terminalreporter) -> None:
    """List the checks of the conformance suite by how they were proven."""
    proven: dict[str, list[str]] = {}
    for outcome in ("passed", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            how = dict(report.user_properties).get(PROVEN)
            if how is None:
                continue
            if outcome == "skipped":
                how = f"not proven, {report.longrepr[2].removeprefix('Skipped: ')}"
            suite, _, check = report.nodeid.rpartition("::")
            key = f"{suite.rpartition('::')[2]}: {how}"
            proven.setdefault(key, []).append(check.removeprefix("test_"))
    if proven:
        terminalreporter.section("amphal: how each check was proven")
        for how, checks in sorted(proven.items()):
            terminalreporter.write_line(f"{how}:")
            terminalreporter.write_line(f"    {', '.join(checks)}")
