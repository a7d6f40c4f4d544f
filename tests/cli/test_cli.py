"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import pytest

from amphal import _cli

OUTSIDE = tempfile.gettempdir()  # in a checkout, ./amphal would shadow the installed package


def test_json_has_a_row_a_backend_and_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Every backend is a row, available or with its reason; the plan carries its reasons."""
    assert _cli.main(["detect", "--device", "cpu", "--precision", "fp32", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in document["backends"]}
    assert {"cuda", "xpu", "mps", "cpu"} <= set(rows)
    assert rows["cpu"]["available"]
    assert all(row["available"] or row["reason"] for row in rows.values())
    assert document["plan"]["dtype"] == "float32"
    assert document["plan"]["reasons"]
    assert document["error"] is None


def test_a_person_sees_the_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json: a table and the plan's paragraph."""
    assert _cli.main(["detect", "--device", "cpu"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "You named cpu" in out
    assert "cuda" in out


def test_no_plan_is_exit_status_1_and_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A device that is not there: the rows are shown all the same, the error goes to stderr."""
    assert _cli.main(["detect", "--device", "nosuch"]) == 1
    captured = capsys.readouterr()
    assert "nosuch" in captured.err
    assert _cli.main(["detect", "--device", "nosuch", "--json"]) == 1
    assert "nosuch" in json.loads(capsys.readouterr().out)["error"]


def test_a_slow_precision_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The warning of a named precision that does not pay is in the JSON, not on the side."""
    from amphal import Hardware, detect
    from amphal.testing import simulate

    with simulate(Hardware("cuda", "Tesla T4", vendor="nvidia", capability=(7, 5))):
        detect.cache_clear()
        assert _cli.main(["detect", "--precision", "bf16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "emulated" in document["warnings"][0]


def test_python_dash_m() -> None:
    """``python -m amphal`` is the same program."""
    result = subprocess.run(
        [sys.executable, "-m", "amphal", "detect", "--json"],
        capture_output=True,
        text=True,
        cwd=OUTSIDE,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["plan"]["device"]
