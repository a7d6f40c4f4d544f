"""The example that trains an encoder under two casting policies."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")


def test_both_policies_converge_and_the_difference_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """50 steps bring both losses well below chance, and the table shows what ran differently."""
    path = Path(__file__).parents[2] / "examples" / "op_policy.py"
    spec = importlib.util.spec_from_file_location("op_policy_example", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.main(["--steps", "50"])
    for losses in (found["cpu"], found["cuda"]):
        assert len(losses) == 50
        assert losses[0] > 0.6
        assert sum(losses[-5:]) / 5 < 0.4
    assert found["different"] >= 3
    printed = capsys.readouterr().out
    assert "native_layer_norm" in printed
    assert "softplus" in printed
