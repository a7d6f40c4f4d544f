"""The repository's own promises: its commands, its skips, its layout."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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


def test_benchmarks_renew_their_own_tables_and_no_others() -> None:
    """run.py --write replaces the section of what ran, in place, and leaves the page otherwise."""
    renewed = runpy.run_path(str(ROOT / "benchmarks" / "run.py"))["renewed"]
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    facts = {"date": "2026-01-02", "device": "a toy", "threads": 3, "torch": "9.9"}
    assert renewed(page, facts, {}) == page
    new = renewed(page, facts, {"scaler": "| a row |\n"})
    section = (
        "### scaler.py\n\n2026-01-02, a toy, 3 threads, torch 9.9\n\n```text\n| a row |\n```\n"
    )
    before, after = new.split(section)
    assert page.startswith(before + "### scaler.py\n")
    assert page.endswith(after)
    assert renewed(new, facts, {"scaler": "| a row |\n"}) == new


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """Each relative link names a file that is there, and a heading that the file has."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_every_page_is_linked_from_the_readme() -> None:
    """A page that nobody can find is not documentation."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = [page.relative_to(ROOT).as_posix() for page in PAGES if page.name != "README.md"]
    assert [name for name in names if name not in readme] == []


def test_public_ci_runs_each_supported_python_through_tox() -> None:
    """The versions are those of the classifiers, and the workflow runs tox's own environments."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: 3."
    supported = [c.removeprefix(prefix) for c in project["classifiers"] if c.startswith(prefix)]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    matrix = re.findall(r"python: \[(.*)\]", workflow)
    assert matrix == [", ".join(f'"3.{minor}"' for minor in supported)]
    environments = re.findall(r"run: tox -e (\w+)$", workflow, re.MULTILINE)
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")
    assert environments == re.findall(r"^env_list = (.*)$", tox, re.MULTILINE)[0].split(", ")


def test_a_bug_report_asks_for_what_the_machine_is() -> None:
    """The template asks for the two commands that show versions, devices and the plan."""
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.md").read_text(encoding="utf-8")
    assert "`amphal env`" in text
    assert "`amphal detect --json`" in text


def test_the_changelog_has_the_keep_a_changelog_form() -> None:
    """Newest first, "Unreleased" on top; sections have the form's names, each at most once."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    preamble, *releases = re.split(r"^## ", text, flags=re.MULTILINE)
    assert preamble.startswith("# Changelog\n")
    heads = [release.split("\n")[0] for release in releases]
    assert heads[0] == "Unreleased"
    assert [h for h in heads[1:] if not re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", h)] == []
    names = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for release in releases:
        sections = re.findall(r"^### (.*)$", release, re.MULTILINE)
        assert set(sections) <= names
        assert len(set(sections)) == len(sections)
