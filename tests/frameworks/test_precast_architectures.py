"""``amphal.precast_`` on the architectures of transformers, with random weights."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amphal

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from _architectures import TRANSFORMERS
from precast import adapted, call, same


def plan() -> amphal.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        return amphal.detect("cpu", precision="bf16")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_outputs_stay_bit_identical(name: str) -> None:
    """On inputs not seen before, in training and eval mode, and a third of the bytes are saved."""
    make, inputs = TRANSFORMERS[name]
    torch.manual_seed(0)
    model = make().eval().requires_grad_(False)
    precast = copy.deepcopy(model)
    report = amphal.precast_(precast, example_inputs=inputs(), plan=plan())
    assert report.bytes_saved > 0.33 * sum(p.nbytes for p in model.parameters())
    for training in (False, True):
        x = inputs()
        assert same(*(_run(m.train(training), x) for m in (model, precast)))


def _run(model: nn.Module, inputs: Any) -> Any:
    torch.manual_seed(1)
    with torch.no_grad(), amphal.autocast(plan()):
        return call(model, inputs)


def test_a_tied_head_stays_and_an_untied_one_is_stored_low() -> None:
    """GPT-2 ties its output layer to its embedding, which reads the weight in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    for tied in (True, False):
        model = GPT2LMHeadModel(GPT2Config(**size, tie_word_embeddings=tied))
        inputs = {"input_ids": torch.randint(64, (1, 8)), "use_cache": False}
        report = amphal.precast_(
            model.eval().requires_grad_(False), example_inputs=inputs, plan=plan()
        )
        assert ("lm_head.weight" in report.cast) is not tied
        assert "embedding" in report.left["transformer.wte.weight"]


def test_adapters_on_a_frozen_stack_train_alike() -> None:
    """The stack of the benchmark: twenty steps with the same losses."""

    def losses(precast: bool) -> list[float]:
        model = adapted()
        torch.manual_seed(1)
        x, y = torch.randn(2, 1, 8, 768)
        if precast:
            assert amphal.precast_(model, example_inputs=x, plan=plan()).cast
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        found = []
        for _ in range(20):
            optimizer.zero_grad()
            with amphal.autocast(plan()):
                loss = nn.functional.mse_loss(model(x).float(), y)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    want = losses(False)
    assert losses(True) == want
    assert want[-1] < want[0]
