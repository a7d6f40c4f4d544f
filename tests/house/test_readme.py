"""What README.md shows and says is so."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amphal

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
EXAMPLE = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[0]


class Model(nn.Linear):
    """A linear classifier that starts at zero, so that any change of it is a step's."""

    def __init__(self) -> None:
        super().__init__(8, 2)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


def loader() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    return [(x, (x[:, 0] > 0).long())] * 3


@pytest.mark.filterwarnings("ignore::amphal.errors.PrecisionWarning")
@pytest.mark.parametrize("precision", ["auto", "bf16", "fp16", "fp32"])
def test_example_runs(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop runs as it stands, in every precision, and each step lands in the weights."""
    monkeypatch.setenv("AMPHAL_PRECISION", precision)
    amphal.detect.cache_clear()
    losses: list[torch.Tensor] = []

    def loss_fn(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert logits.dtype is names["plan"].dtype
        losses.append(nn.functional.cross_entropy(logits, y))
        return losses[-1]

    names: dict[str, Any] = {"Model": Model, "loader": loader(), "loss_fn": loss_fn}
    exec(compile(EXAMPLE, "README.md", "exec"), names)

    plan = names["plan"]
    assert plan == amphal.detect()
    assert names["scaler"].is_enabled() is plan.use_scaler is (plan.dtype is torch.float16)
    assert names["model"].weight.device.type == plan.device.type
    assert names["model"].weight.isfinite().all()
    first, second, third = (float(loss.detach()) for loss in losses)
    assert first > second > third


def test_example_names_no_device() -> None:
    """The loop that is the same everywhere holds no string at all, so no device's name."""
    strings = [n for n in ast.walk(ast.parse(EXAMPLE)) if isinstance(n, ast.Constant)]
    assert not [n.value for n in strings if isinstance(n.value, str)]


def test_table_has_the_built_in_backends() -> None:
    """The table of devices has a row for each backend that ships with amphal, and no other."""
    rows = set(re.findall(r"^\| `([a-z]+)`(?:, \w+)? \|", README, re.MULTILINE))
    assert rows == {path.stem for path in built_in() if not path.stem.startswith("_")}


def built_in() -> list[Path]:
    return list((Path(__file__).parents[2] / "backends").glob("*.py"))


def test_two_commands() -> None:
    """Exactly two commands start from nothing: one trains, one tests; what they name exists."""
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv ")]
    train, test = commands
    assert train.endswith(".venv/bin/python examples/train.py")
    assert (Path(__file__).parents[2] / "examples" / "train.py").exists()
    assert test.endswith(" && .venv/bin/tox")
