"""Every Python block of the README and of docs/ runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ELSEWHERE = {
    "README.md": "tests/house/test_readme.py",
    "distributed.md": "tests/distributed/test_docs_distributed.py",
    "frameworks.md": "tests/frameworks/test_docs_frameworks.py",
    "write-a-backend.md": "tests/contract/test_plugins_guide.py",
}
"""Pages whose blocks need more than an interpreter (a model, ranks, frameworks, a plug-in).

Each with the test that runs them.
"""

ONE_AFTER_ANOTHER = {"op-lists.md"}
"""Pages on which later blocks use the names of earlier ones."""


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


PAGES = {p.name: python_blocks(p) for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
CODE = {
    f"{name}-{number}": block
    for name, blocks in sorted(PAGES.items())
    if name not in ELSEWHERE
    for number, block in enumerate(
        ["\n".join(blocks)] if blocks and name in ONE_AFTER_ANOTHER else blocks
    )
}


@pytest.mark.parametrize("code", CODE.values(), ids=CODE)
def test_the_code_of_a_page_runs(code: str, tmp_path: Path) -> None:
    """In a fresh interpreter, from another folder, without error."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ELSEWHERE)
def test_a_page_with_a_test_of_its_own_is_run_there(page: str) -> None:
    """The page has Python blocks, and that test reads them from the page."""
    assert PAGES[page]
    source = (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8")
    assert f'"{page}"' in source
    assert "```" in source


def test_the_pages_are_found() -> None:
    """The list is made from the folder; it holds the pages that have code."""
    ours = {name for name, blocks in PAGES.items() if blocks} - set(ELSEWHERE)
    assert ours >= {"autocast.md", "op-lists.md", "precast.md", "scaler.md", "trace.md", "tune.md"}
    assert {name.rpartition("-")[0] for name in CODE} == ours


def test_code_is_marked_as_python_or_as_something_else() -> None:
    """A block without a language would be run by nobody."""
    unmarked = []
    for name in PAGES:
        page = ROOT / name if name == "README.md" else ROOT / "docs" / name
        fences = re.findall(r"^ *```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        unmarked += [f"{name}: block {i}" for i, mark in enumerate(fences[::2]) if not mark]
    assert unmarked == []
