"""The cache of cast weights stays right inside amphal's regions."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
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


def in_new_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tempfile.gettempdir(),
    )
    return done.stdout.strip()


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


@pytest.mark.parametrize("region", [amphal.autocast, torch.autocast])
@pytest.mark.parametrize(
    "options", [{}, {"fused": True}, {"foreach": True}], ids=["plain", "fused", "foreach"]
)
def test_weights_stepped_without_a_scaler_are_seen(region: Any, options: dict[str, bool]) -> None:
    """The forward after any optimizer's step uses the new weights, in torch's regions too."""
    amphal.autocast("cpu", BF16)  # the first region that is made installs the hook
    layer, x = torch.nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    torch.nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, **options)
    with region("cpu", BF16):
        layer(x).float().sum().backward()
        optimizer.step()
        assert layer.weight.abs().max() == 0
        assert layer(x).abs().max() == 0


def test_a_scaler_alone_lets_steps_be_seen() -> None:
    """A program with amphal's scaler and torch's regions: weights stepped past the scaler."""
    code = (
        "import torch, amphal\n"
        "amphal.GradScaler('cpu', enabled=False)\n"
        "layer, x = torch.nn.Linear(4, 4, bias=False), torch.ones(1, 4)\n"
        "torch.nn.init.ones_(layer.weight)\n"
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    layer(x).float().sum().backward()\n"
        "    torch.optim.SGD(layer.parameters(), lr=1.0).step()\n"
        "    print(layer(x).abs().max().item())\n"
    )
    assert in_new_process(code) == "0.0"


def test_import_alone_installs_no_hook() -> None:
    """Importing amphal changes nothing in torch; the first region installs one hook."""
    code = (
        "import torch, amphal\n"
        "from torch.optim.optimizer import _global_optimizer_post_hooks as hooks\n"
        "print(len(hooks), end=' ')\n"
        "for _ in range(2): amphal.autocast('cpu', torch.bfloat16); amphal.GradScaler('cpu')\n"
        "print(len(hooks))\n"
    )
    assert in_new_process(code) == "0 1"


def test_a_compiled_step_has_the_graphs_that_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook breaks no graph of a compiled step, whose weights are seen by the next region."""
    amphal.autocast("cpu", BF16)
    hooks = torch.optim.Optimizer.profile_hook_step.__globals__["_global_optimizer_post_hooks"]
    assert hooks
    graphs = []
    for with_hook in (True, False):
        layer, x = torch.nn.Linear(4, 4, bias=False), torch.ones(1, 4)
        torch.nn.init.ones_(layer.weight)
        optimizer = torch.optim.SGD(layer.parameters(), lr=torch.tensor(1.0), foreach=True)
        layer(x).sum().backward()
        torch._dynamo.reset()
        count = torch._dynamo.testing.CompileCounter()
        step = torch.compile(optimizer.step, backend=count)
        with monkeypatch.context() as patch:
            if not with_hook:
                for key in list(hooks):
                    patch.delitem(hooks, key)
            with amphal.autocast("cpu", BF16):
                layer(x)
                step()
        assert layer.weight.abs().max() == 0
        with amphal.autocast("cpu", BF16):
            assert layer(x).abs().max() == 0
        graphs.append(count.frame_count)
    assert graphs[1] > 0
    assert graphs[0] == graphs[1]


def test_without_the_cache_bare_writes_are_seen() -> None:
    """``cache_enabled=False`` is the form that is right whatever changes a weight."""
    layer, x = torch.nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    with amphal.autocast("cpu", BF16, cache_enabled=False):
        for value in (1.0, 2.0):
            layer.weight.data.fill_(value)
            assert layer(x)[0, 0].item() == 4 * value


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
