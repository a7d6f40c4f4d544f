"""The commands beside ``detect``: what they print, for people and programs, and their status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import amphal
from amphal._cli import main


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Status, standard output, standard error."""
    status = main(argv)
    out, err = capsys.readouterr()
    return status, out, err


def test_bare_it_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command is there with a sentence, and that is no error."""
    status, out, _ = answer(capsys)
    assert status == 0
    for command in ("detect", "ops", "hardware", "env", "run", "doctor"):
        assert f"\n    {command} " in out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """One place holds it."""
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"amphal {amphal.__version__}"


@pytest.mark.parametrize("command", ["detect", "ops", "hardware", "env", "run", "doctor"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the command itself."""
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"example: amphal {command}" in capsys.readouterr().out


def test_ops_is_what_op_lists_says(capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON, every listed op with its policy; for one op, its overloads."""
    status, out, _ = answer(capsys, "ops", "cuda", "--json")
    rows = {row["op"]: row["cuda"] for row in json.loads(out)}
    assert status == 0
    assert rows == dict(amphal.op_lists("cuda"))
    _, out, _ = answer(capsys, "ops", "cuda", "--diff", "cpu", "--op", "softmax", "--json")
    (row,) = json.loads(out)
    assert row == {"op": "softmax.int", "cuda": "fp32_set_opt_dtype", "cpu": "not listed"}


def test_ops_differences_are_all_and_only_differences(capsys: pytest.CaptureFixture[str]) -> None:
    """An op that both cast alike is left out."""
    _, out, _ = answer(capsys, "ops", "cuda", "--diff", "cpu", "--json")
    rows = {row["op"] for row in json.loads(out)}
    here, there = dict(amphal.op_lists("cuda")), dict(amphal.op_lists("cpu"))
    assert rows == {op for op in {*here, *there} if here.get(op) != there.get(op)}
    assert "mm" not in rows


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["ops", "cudda"], "'cuda'"),
        (["ops", "cuda", "--op", "sofmax"], "'softmax.int'"),
        (["hardware", "t44"], "'t4'"),
        (["run", "no-such.py"], "no file 'no-such.py'"),
        (["doctor", "no-such.py"], "no file 'no-such.py'"),
    ],
)
def test_a_slip_is_one_line_with_the_near_name(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2 and no traceback."""
    status, out, err = answer(capsys, *argv)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_hardware_shows_the_plan_of_each_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as detect() says of the record."""
    monkeypatch.delenv("COLUMNS", raising=False)  # which a person may set to have it wrapped
    status, out, _ = answer(capsys, "hardware", "--json")
    plans = json.loads(out)
    assert status == 0
    assert plans.keys() == amphal.known_hardware().keys()
    assert plans["t4"]["use_scaler"]
    _, out, _ = answer(capsys, "hardware", "t4")
    assert "fp16 with a gradient scaler" in out
    _, out, _ = answer(capsys, "hardware", "--matrix")
    assert len(out.splitlines()) == 1 + len(plans)  # a row each, and none is wrapped


def test_env_names_versions_backends_and_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a bug report needs, and the same as JSON."""
    monkeypatch.setenv("AMPHAL_PRECISION", "fp32")
    amphal.detect.cache_clear()
    status, out, _ = answer(capsys, "env", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["amphal"] == amphal.__version__
    assert found["settings"] == {"AMPHAL_PRECISION": "fp32"}
    assert found["backends"]["cpu"]["available"]
    assert found["backends"]["cpu"]["contract"] == 1
    _, out, _ = answer(capsys, "env")
    assert f"amphal: {amphal.__version__}" in out


SCRIPT = """
import sys, torch
print(sys.argv[1:], __name__)
with torch.autocast("cpu", torch.bfloat16):
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
sys.exit(3)
"""


def test_run_runs_a_script_as_python_does_and_writes_its_trace(tmp_path: Path) -> None:
    """Its arguments, its folder, its exit status; the page holds what it did."""
    (tmp_path / "train.py").write_text(SCRIPT)
    page = tmp_path / "out.html"
    command = [sys.executable, "-m", "amphal", "run", "--trace", str(page), "train.py", "--steps"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 3, result.stderr
    assert "['--steps'] __main__" in result.stdout
    assert '"op": "mm", "policy": "lower_precision"' in page.read_text(encoding="utf-8")
