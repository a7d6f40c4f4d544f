"""``examples/train.py`` on several processes, as its users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"
TINY = ["--width", "32", "--layers", "1", "--context", "16", "--batch", "4", "--minutes", "5"]
FP16 = [*TINY, "--device", "cpu", "--precision", "fp16"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def start(command: list[str]) -> list[str]:
    """The lines of a run that must end well; only its first process speaks."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("AMPHAL_")}
    done = subprocess.run(
        command, env={**clean, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def alone(out: Path, *args: str) -> list[str]:
    return start([sys.executable, str(SCRIPT), "--out", str(out), *args])


def on(processes: int, out: Path, *args: str) -> list[str]:
    return start([*TORCHRUN, str(processes), str(SCRIPT), "--out", str(out), *args])


def checkpoint(out: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(out / "checkpoint.pt", weights_only=True)
    return state


def test_trains_as_one_process_and_resumes_on_any_number(tmp_path: Path) -> None:
    """A run that goes from two processes to one and on to three is one process's run.

    Three have unequal shares of a batch of four.
    """
    moved, through = tmp_path / "moved", tmp_path / "through"
    resume = ["--resume", str(moved / "checkpoint.pt"), "--steps"]
    lines = on(2, moved, *FP16, "--steps", "3")
    assert lines[0].endswith("The 2 ranks agreed on fp16.")
    assert sum("validation loss" in line for line in lines) == 2
    alone(moved, *resume, "5")
    on(3, moved, *resume, "8")
    alone(through, *FP16, "--steps", "8")

    state, other = checkpoint(moved), checkpoint(through)
    assert state["step"] == other["step"] == len(state["losses"]) == 8
    # The same fp16 sums in another order; the scaler's state is the same number by number.
    assert state["losses"] == pytest.approx(other["losses"], abs=0.01)
    assert state["validation"][-1] == pytest.approx(other["validation"][-1], abs=0.01)
    assert state["scaler"] == other["scaler"]
    assert state["scaler"]["amphal"]["steps"] > 0
    assert torch.equal(state["rng"], other["rng"])


def test_starts_processes_itself(tmp_path: Path) -> None:
    """--distributed 2 is torchrun with two processes, on this machine."""
    args = [*TINY, "--device", "cpu", "--precision", "fp32", "--steps", "2"]
    lines = alone(tmp_path, "--distributed", "2", *args)
    assert lines[0].endswith("The 2 ranks agreed on fp32.")
    assert checkpoint(tmp_path)["step"] == 2
