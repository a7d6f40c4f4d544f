"""Every Python block of docs/distributed.md runs as it stands, on two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from torch import nn

import amphal
from amphal.contract.spelling import short_name

PAGE = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
SCRIPT, *FRAGMENTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_script_runs(tmp_path: Path) -> None:
    """The script of the page runs under torchrun."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def run_block(block: str, precision: str, path: str) -> str:
    """The block after the script's names: two layers, a plan, a batch. The plan's precision."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        plan = amphal.detect(precision=precision)
    torch.manual_seed(0)
    names = {
        "torch": torch,
        "dist": dist,
        "nn": nn,
        "amphal": amphal,
        "plan": plan,
        "model": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        "scaler": amphal.GradScaler(plan),
        "x": torch.randn(4, 8),
        "y": torch.randn(4, 8),
        "path": path,
    }
    exec(compile(block, "docs/distributed.md", "exec"), names)
    return short_name(plan.dtype)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("number", range(len(FRAGMENTS)))
def test_a_block_runs(two_ranks: Ranks, tmp_path: Path, number: int, precision: str) -> None:
    """A block that goes on from the script runs on two ranks, with and without a scaler."""
    done = two_ranks(run_block, FRAGMENTS[number], precision, str(tmp_path / "checkpoint.pt"))
    assert done == [precision, precision]
