"""Fail if a test was skipped in every environment that ran it.

    python tests/check_skips.py REPORTS

REPORTS is a folder of JUnit files, one an environment, as pytest writes them.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def never_run(reports: Path) -> list[str]:
    """The tests that some environment skipped and none ran."""
    ran: set[str] = set()
    skipped: dict[str, str] = {}
    for path in sorted(reports.glob("*.xml")):
        for case in ET.parse(path).getroot().iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            mark = case.find("skipped")
            if mark is None:
                ran.add(name)
            else:
                skipped[name] = f"{path.stem}: {mark.get('message')}"
    return [f"{name} ({why})" for name, why in sorted(skipped.items()) if name not in ran]


def main() -> int:
    """Report, and return 1 if a test ran nowhere or there is nothing to look at."""
    reports = Path(sys.argv[1])
    count = len(list(reports.glob("*.xml")))
    if not count:
        print(f"no reports in {reports}: run the test environments first")
        return 1
    missing = never_run(reports)
    for name in missing:
        print(f"skipped everywhere: {name}")
    print(f"{count} reports, {len(missing)} tests that no environment ran")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
