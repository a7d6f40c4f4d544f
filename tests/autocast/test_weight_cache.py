"""The cache of cast weights stays right inside amphal's regions."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amphal
from amphal.contract.records import torch_version

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _named_dtypes_may_be_slow_here() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        yield


class Casts(TorchDispatchMode):
    """Counts the casts that reach the dispatcher."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_a_nested_region_of_another_dtype_casts_the_weights_anew() -> None:
    """torch keys its cache by the weight alone: a bf16 cast met fp16 inputs and raised."""
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with amphal.autocast("cpu", BF16):
        assert layer(x).dtype is BF16
        with amphal.autocast("cpu", FP16):
            assert layer(x).dtype is FP16
        assert layer(x).dtype is BF16
        with amphal.autocast("cpu", enabled=False):
            with amphal.autocast("cpu", FP16):
                assert layer(x).dtype is FP16
        assert layer(x).dtype is BF16


def test_a_nested_region_of_the_same_dtype_keeps_the_cache() -> None:
    """Nothing is cast twice for a region that changes nothing."""
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4, dtype=BF16)
    with Casts() as casts, amphal.autocast("cpu", BF16):
        layer(x)
        before = casts.count
        with amphal.autocast("cpu", BF16):
            layer(x)
        layer(x)
    assert before > 0
    assert casts.count == before


def test_the_cache_ends_with_the_outermost_region() -> None:
    """An update between two regions is seen by the second."""
    layer, x = torch.nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    for value in (1.0, 2.0):
        with torch.no_grad():
            layer.weight.fill_(value)
        with amphal.autocast("cpu", BF16):
            assert layer(x)[0, 0].item() == 4 * value


def test_weights_changed_by_the_scaler_inside_a_region_are_seen() -> None:
    """A whole training step inside one region: the second forward uses the stepped weights."""
    layer, x = torch.nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    torch.nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = amphal.GradScaler("cpu", init_scale=2.0, enabled=True)
    with amphal.autocast("cpu", BF16):
        loss = layer(x).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert layer.weight.max() == 0
        assert layer(x).abs().max() == 0


def test_gradients_after_a_pass_without() -> None:
    """A no_grad forward in a region of its own first does not cost the weights their gradient."""
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with amphal.autocast("cpu", BF16):
        with torch.no_grad(), amphal.autocast("cpu", BF16):
            layer(x)
        layer(x).float().sum().backward()
    assert layer.weight.grad is not None


def test_gradients_after_a_pass_without_in_the_same_region() -> None:
    """torch keeps the casts of the two apart from 2.13 on; before, cache_enabled=False does."""
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    cache = None if torch_version() >= (2, 13) else False
    with amphal.autocast("cpu", BF16, cache_enabled=cache):
        with torch.no_grad():
            layer(x)
        layer(x).float().sum().backward()
    assert layer.weight.grad is not None


def test_a_long_no_grad_region_casts_each_weight_once() -> None:
    """Memory is bounded by one cast a weight, however long the region lasts."""
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4, dtype=BF16)
    with Casts() as casts, torch.no_grad(), amphal.autocast("cpu", BF16):
        for _ in range(20):
            layer(x)
    assert casts.count == 2  # weight and bias


def test_checkpoint_with_the_cache_off_recomputes_the_same() -> None:
    """A block that reuses a cached layer under checkpoint: cache_enabled=False is always right."""
    layer = torch.nn.Linear(4, 4)

    def block(z: torch.Tensor) -> torch.Tensor:
        return layer(torch.relu(layer(z)))

    grads = []
    for recompute in (False, True):
        x = torch.ones(2, 4, requires_grad=True)
        layer.zero_grad()
        with amphal.autocast("cpu", BF16, cache_enabled=False):
            first = layer(x)
            y = checkpoint(block, first, use_reentrant=False) if recompute else block(first)
            loss = y.float().sum()
        loss.backward()
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad.clone())
    assert torch.equal(*grads)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputes_in_the_regions_dtype(reentrant: bool) -> None:
    """The recomputation sees the region of the forward pass, dtype and all, after it was left."""
    seen: list[torch.dtype] = []
    weight = torch.nn.Parameter(torch.eye(4))

    def block(z: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_autocast_dtype("cpu"))  # first: recomputation stops early
        return z @ weight

    x = torch.ones(2, 4, requires_grad=True)
    with amphal.autocast("cpu", FP16):
        y = checkpoint(block, x, use_reentrant=reentrant)
    y.float().sum().backward()
    assert seen == [FP16, FP16]
