"""Every Python block of the user's pages runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["docs/autocast.md", "docs/precast.md", "docs/scaler.md", "docs/tune.md"]
BLOCKS = [
    pytest.param(block, id=f"{page}-{i}")
    for page in PAGES
    for i, block in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    )
]


def test_the_blocks_of_op_lists_run(tmp_path: Path) -> None:
    """In the page's order, in one interpreter: later blocks use the names of earlier ones."""
    text = (ROOT / "docs" / "op-lists.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert blocks
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block: str, tmp_path: Path) -> None:
    """In a fresh interpreter, from another folder, without error."""
    result = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
