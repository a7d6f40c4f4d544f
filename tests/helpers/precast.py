"""What the tests of ``precast_`` share: a plan, runs in its region, comparison of bits."""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import amphal

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

LOW, FULL = torch.bfloat16, torch.float32


def plan(precision: str = "bf16") -> amphal.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        return amphal.detect("cpu", precision=precision)


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return []


def run(
    model: Callable[..., Any], inputs: Any, seed: int = 7, region: Any = None
) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    with plan().autocast() if region is None else region:
        if isinstance(inputs, dict):
            return leaves(model(**inputs))
        return leaves(model(*inputs) if isinstance(inputs, tuple) else model(inputs))


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        assert x.dtype is y.dtype
        assert torch.equal(x, y)


def assert_alike(model: nn.Module, precast: nn.Module, inputs: Any) -> None:
    """In training and eval mode, with gradients and without, bit for bit."""
    for training, grad in itertools.product((False, True), repeat=2):
        pair = [copy.deepcopy(m).train(training) for m in (model, precast)]
        with torch.set_grad_enabled(grad):
            assert_same(*(run(m, inputs) for m in pair))


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def low_names(model: nn.Module) -> set[str]:
    return {n for n, p in model.named_parameters() if p.dtype is LOW}
