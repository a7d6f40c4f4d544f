"""Every Python block of docs/frameworks.md runs as it stands, with the real framework."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import collate, gpt2, texts
from helpers.ranks import Ranks
from torch import nn

import amphal
from amphal.contract.spelling import short_name

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n.*?```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))


def test_every_section_has_its_block() -> None:
    """No block of the page is left out here."""
    assert len(SECTIONS) == PAGE.count("```python") == 5


def run_block(name: str, precision: str, folder: str) -> str:
    """The block after the names that its section takes for given. The plan's precision."""
    from accelerate.state import AcceleratorState
    from lightning import LightningModule

    if name == "DeepSpeed":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled at first use

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            out: torch.Tensor = self.layer(batch).float().mean()
            return out

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    AcceleratorState._reset_state(reset_partial_state=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        plan = amphal.detect("cpu", precision=precision)
    model = gpt2() if name == "transformers" else nn.Linear(8, 8)
    names: dict[str, Any] = {
        "plan": plan,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), fused=True),
        "x": torch.ones(2, 8),
        "module": Module(),
        "loader": torch.utils.data.DataLoader(torch.ones(4, 8), batch_size=2),  # type: ignore[arg-type]
        "dataset": texts(),
        "collate": collate,
        "folder": folder,
    }
    exec(compile(SECTIONS[name], "docs/frameworks.md", "exec"), names)
    if name == "transformers":
        assert names["trainer"].state.global_step == 2
    return short_name(plan.dtype)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_a_block_runs(
    one_rank: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    precision: str,
) -> None:
    """The block runs in each precision."""
    if name == "DeepSpeed":
        done = one_rank(run_block, name, precision, str(tmp_path), timeout=240)
    else:
        monkeypatch.chdir(tmp_path)  # Lightning leaves its logs and checkpoints where it runs
        done = [run_block(name, precision, str(tmp_path))]
    assert done == [precision]
