"""``examples/train.py``, run as its users run it: in a process of its own, on tiny settings."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train.py"
DEVICE = os.environ.get("AMPHAL_TEST_DEVICE", "cpu")
TINY = ["--width", "32", "--layers", "1", "--context", "16", "--batch", "4", "--minutes", "5"]
DEVICE_NAMES = {"cpu", "cuda", "xpu", "mps", "xla", "hpu", "npu", "mlu", "musa", "mtia", "meta"}
# op_policy.py compares two devices' policies, so it must name them.
AGNOSTIC = [path for path in sorted(EXAMPLES.glob("*.py")) if path.name != "op_policy.py"]


def environment(**extra: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("AMPHAL_")}
    return {**clean, "OMP_NUM_THREADS": "1", **extra}


def run_script(out: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--out", str(out), *args]
    return subprocess.run(command, env=environment(**env), capture_output=True, text=True)


def good(out: Path, *args: str, **env: str) -> list[str]:
    """The lines of a run that must end well."""
    done = run_script(out, *args, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def checkpoint(out: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(out / "checkpoint.pt", weights_only=True)
    return state


@pytest.mark.parametrize(
    ("precision", "scaler", "live"),
    [
        ("fp32", "auto", False),
        ("bf16", "auto", False),
        ("fp16", "auto", True),
        ("bf16", "on", True),
        ("fp16", "off", False),
    ],
)
def test_learns(tmp_path: Path, precision: str, scaler: str, live: bool) -> None:
    """In each precision the validation loss falls, and the scaler is live where it is asked for."""
    args = [*TINY, "--steps", "40", "--device", DEVICE, "--scaler", scaler]
    lines = good(tmp_path, *args, AMPHAL_PRECISION=precision)

    assert f": {precision} " in lines[0]  # the plan's explanation comes first
    ends = re.fullmatch(r"validation loss (\S+) -> (\S+) in 40 steps", lines[-1])
    assert ends is not None
    assert float(ends[2]) < float(ends[1]) - 0.5
    state = checkpoint(tmp_path)
    assert [f"{loss:.3f}" for _, loss in (state["validation"][0], state["validation"][-1])] == [
        ends[1],
        ends[2],
    ]
    assert any(line.startswith("loss scale at the end: ") for line in lines) is live
    if live:
        assert state["scaler"]["scale"] >= 1
    speeds = next(line for line in lines if line.startswith("tokens/s: "))
    assert "in float32" in speeds
    assert ("medians of steps taken in turn" in speeds) is (precision != "fp32")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resumes_exactly(tmp_path: Path, precision: str) -> None:
    """Stopped at step 4 and resumed, a run has the losses and weights of one that went through."""
    through, halves = tmp_path / "through", tmp_path / "halves"
    args = [*TINY, "--device", "cpu", "--precision", precision]
    good(through, *args, "--steps", "8")
    good(halves, *args, "--steps", "4")
    good(halves, "--resume", str(halves / "checkpoint.pt"), "--steps", "8")

    a, b = checkpoint(through), checkpoint(halves)
    assert len(a["losses"]) == 8
    assert a["losses"] == b["losses"]
    assert a["validation"][-1] == b["validation"][-1]
    assert a["scaler"] == b["scaler"]
    assert torch.equal(a["rng"], b["rng"])
    for name, weight in a["model"].items():
        assert torch.equal(weight, b["model"][name]), name


def test_stops_at_its_time(tmp_path: Path) -> None:
    """A run whose time is over ends as one whose steps are done, and says how to go on."""
    args = [*TINY, "--device", "cpu", "--steps", "100000", "--minutes", "0.001"]
    lines = good(tmp_path, *args)
    hint = f"--resume {tmp_path / 'checkpoint.pt'}"
    assert any(line.startswith("the 0.001 minutes are over") and hint in line for line in lines)
    assert re.fullmatch(r"validation loss \S+ -> \S+ in \d+ steps", lines[-1])


def test_ctrl_c_saves(tmp_path: Path) -> None:
    """Ctrl-C leaves a whole checkpoint and the command that goes on from it."""
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), *TINY, "--steps", "1000000"]
    with subprocess.Popen(
        [*command, "--device", "cpu"], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("validation loss"):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130
    assert f"examples/train.py --resume {tmp_path / 'checkpoint.pt'}" in rest
    state = checkpoint(tmp_path)
    assert state["step"] == len(state["losses"]) >= 1
    assert not (tmp_path / "checkpoint.tmp").exists()


@pytest.mark.parametrize(
    ("args", "say"),
    [
        (["--device", "nonsense"], "no backend is registered for device type 'nonsense'"),
        (["--precision", "fp8"], "'fp8'"),
        (["--width", "33"], "--width must be a multiple of 32, got 33"),
        (["--steps", "0"], "--steps must be more than 0, got 0"),
        (["--lr", "nan"], "--lr must be more than 0, got nan"),
        (["--batch", "many"], "invalid int value: 'many'"),
        (["--resume", "absent.pt"], "cannot read 'absent.pt'"),
        (["--resume", str(SCRIPT)], "is no checkpoint of this script"),
    ],
)
def test_bad_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    say: str,
) -> None:
    """A bad argument is one clear line on stderr, and no traceback."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train as script

    with pytest.raises(SystemExit) as stopped:
        script.main(["--out", str(tmp_path), *args])
    printed = capsys.readouterr()
    line = printed.err or f"{stopped.value.code}\n"  # a text as exit code goes to stderr
    assert printed.out == ""
    assert re.fullmatch(r"train\.py: error: .*\n", line)
    assert say in line


def test_bad_argument_ends_the_process(tmp_path: Path) -> None:
    """What a person sees of a bad argument is that line, and the exit status is not 0."""
    done = run_script(tmp_path, "--device", "nonsense")
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"train\.py: error: .*'nonsense'.*\n", done.stderr)


def test_resume_keeps_settings(tmp_path: Path) -> None:
    """A resumed run refuses another shape and a last step that lies behind it."""
    good(tmp_path, *TINY, "--device", "cpu", "--steps", "1")
    resume = ["--resume", str(tmp_path / "checkpoint.pt")]
    wider = run_script(tmp_path, *resume, "--steps", "2", "--width", "64")
    assert wider.stderr == "train.py: error: --width 64: the checkpoint was made with 32\n"
    behind = run_script(tmp_path, *resume)
    assert "--steps must be above 1, where the checkpoint is; got 1" in behind.stderr


def test_names_the_extra_before_training(tmp_path: Path) -> None:
    """Without matplotlib the script says what to install, before it trains."""
    code = (
        f"import sys; sys.modules['matplotlib'] = None; sys.path.insert(0, {str(EXAMPLES)!r}); "
        f"sys.argv = ['train.py', '--out', {str(tmp_path)!r}]; import train; train.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "pip install 'amphal[examples]'" in done.stderr


def _docstrings(tree: ast.Module) -> set[ast.AST]:
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                found.add(first.value)
    return found


@pytest.mark.parametrize("path", AGNOSTIC, ids=lambda p: p.name)
def test_names_no_device(path: Path) -> None:
    """No string of the examples is a device and none is called by its module or its method."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = _docstrings(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = re.findall(r"[a-z]+", node.value.lower())
            if node not in docstrings and DEVICE_NAMES.intersection(words):
                found.append(f"line {node.lineno}: {node.value!r}")
        elif isinstance(node, ast.Attribute) and node.attr in DEVICE_NAMES:
            found.append(f"line {node.lineno}: .{node.attr}")
    assert found == []


@pytest.mark.parametrize("path", AGNOSTIC, ids=lambda p: p.name)
def test_no_condition_on_a_device(path: Path) -> None:
    """No condition of the examples looks at a device."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    conditions = (ast.If, ast.IfExp, ast.While, ast.Assert)
    for node in ast.walk(tree):
        tests = [node.test] if isinstance(node, conditions) else []
        tests += [node.subject] if isinstance(node, ast.Match) else []
        for test in tests:
            words = {
                getattr(part, "attr", getattr(part, "id", "")).lower() for part in ast.walk(test)
            }
            looked_at = {w for w in words if "device" in w or w in {"hardware", "is_available"}}
            assert not looked_at, f"line {test.lineno}: {sorted(looked_at)}"
