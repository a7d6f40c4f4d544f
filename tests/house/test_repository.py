"""The repository's own promises: its commands, its skips, its layout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
JUNIT = """<testsuites><testsuite>
<testcase classname="a" name="runs"/>
<testcase classname="a" name="{name}"><skipped message="no device"/></testcase>
</testsuite></testsuites>"""


def test_ci_calls_the_readmes_test_command() -> None:
    """What CI runs is what a newcomer is told to run, and nothing weaker."""
    blocks = (ROOT / "README.md").read_text(encoding="utf-8").split("```sh\n")[1:]
    command = next(b.split("```")[0].strip() for b in blocks if "/tox" in b)
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert command in script.splitlines()
    assert "|| true" not in script


def test_a_test_that_is_skipped_everywhere_is_found(tmp_path: Path) -> None:
    """Skipped in one environment and run in another is fine; run in none is a failure."""

    def check() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "tests" / "check_skips.py"), str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True)

    assert check().returncode == 1  # nothing to look at is no success
    (tmp_path / "cpu.xml").write_text(JUNIT.format(name="needs_gpu"))
    result = check()
    assert result.returncode == 1
    assert "a::needs_gpu (cpu: no device)" in result.stdout
    (tmp_path / "cuda.xml").write_text(JUNIT.format(name="other").replace("runs", "needs_gpu"))
    result = check()
    assert "needs_gpu" not in result.stdout
    assert "a::other" in result.stdout
