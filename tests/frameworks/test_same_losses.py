"""A small GPT-2 and a ViT train alike under torch.amp, amphal, and each framework with amphal.

Every op that autocast lowers runs in the named precision, on the CPU.
"""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from helpers import ways
from helpers.models import STEPS
from helpers.ranks import Ranks

import amphal


def plan_of(precision: str) -> amphal.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        return amphal.detect("cpu", precision=precision)


@functools.cache
def raw(model: str, precision: str, threads: int | None = None) -> list[float]:
    """torch.amp's losses; the number of threads orders sums, which shows in fp16 and bf16."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return ways.raw_torch(model, plan_of(precision))[0]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("model", ["GPT-2", "ViT"])
@pytest.mark.parametrize(
    "way",
    [
        ways.with_amphal,
        ways.with_accelerate,
        ways.with_fabric,
        ways.with_lightning,
        ways.with_trainer,
    ],
)
def test_losses_are_those_of_torch(way: ways.Way, model: str, precision: str) -> None:
    """Twenty steps have the losses of raw torch.amp, and the scaler is amphal's where fp16 is."""
    losses, scaler = way(model, plan_of(precision))
    assert len(losses) == STEPS
    assert losses == pytest.approx(raw(model, precision), abs=1e-5)
    assert losses[-1] < losses[0]
    live = scaler is not None and scaler.is_enabled()
    assert live is (precision == "fp16")
    if live:
        assert isinstance(scaler, amphal.GradScaler)
        assert scaler.steps + scaler.skipped == STEPS


def test_precisions_differ() -> None:
    """The comparison can fail: in another precision the losses are other ones."""
    for model in ("GPT-2", "ViT"):
        low, full = raw(model, "fp16"), raw(model, "fp32")
        assert low != pytest.approx(full, abs=1e-5)


@pytest.mark.parametrize(
    ("precision", "by", "zero", "tolerance"),
    [
        ("fp32", "autocast", 0, 1e-5),
        ("bf16", "autocast", 0, 1e-5),
        ("fp16", "autocast", 0, 1e-5),
        ("bf16", "autocast", 1, 0.02),  # ZeRO reduces the gradients in bf16
        ("bf16", "engine", 1, 0.02),  # every op runs in bf16
    ],
)
@pytest.mark.parametrize("model", ["GPT-2", "ViT"])
def test_deepspeed_losses_are_those_of_torch(
    one_rank: Ranks, model: str, precision: str, by: str, zero: int, tolerance: float
) -> None:
    """A real DeepSpeed engine with the plan's blocks has the losses of torch.amp."""
    (losses,) = one_rank(deepspeed_losses, model, precision, by, zero, timeout=240)
    assert losses == pytest.approx(raw(model, precision, threads=1), abs=tolerance)
    assert losses[-1] < losses[0]


def deepspeed_losses(model: str, precision: str, by: str, zero: int) -> list[float]:
    torch.set_num_threads(1)
    return ways.with_deepspeed(model, plan_of(precision), by, zero)[0]
