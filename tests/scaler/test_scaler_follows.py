"""A scaler with ``enabled=None`` follows the dtype of the region that the loss comes from."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amphal
from amphal._scaler import arguments
from amphal.contract import ScalerSupport
from amphal.errors import ArgumentError, ScalerStateError

pytestmark = pytest.mark.filterwarnings("ignore::amphal.errors.PrecisionWarning")

SMALL = 1e-8
"""A factor that float16 gradients do not survive unscaled."""


def backward(scaler: Any, dtype: Any, model: nn.Module, *, region: Any = None) -> None:
    with region or amphal.autocast("cpu", dtype):
        y = model(torch.full((1, 4), 0.5))
    scaler.scale(y.float().sum() * SMALL).backward()


def linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(4, 4, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


MAKE: dict[str, Callable[[], amphal.GradScaler]] = {
    "device": lambda: amphal.GradScaler("cpu"),
    "plan": lambda: amphal.detect("cpu", precision="bf16").grad_scaler(),
    "fp32 plan": lambda: amphal.GradScaler(amphal.detect("cpu", precision="fp32")),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_the_gradients_of_a_float16_region_survive(make: Callable[[], amphal.GradScaler]) -> None:
    """As with torch's two lines: 5e-9 for each weight."""
    scaler = make()
    model, optimizer = linear()
    assert not scaler.is_enabled()
    for _ in range(2):
        optimizer.zero_grad()
        backward(scaler, "fp16", model)
        assert scaler.is_enabled()
        scaler.unscale_(optimizer)
        assert model.weight.grad is not None
        torch.testing.assert_close(
            model.weight.grad, torch.full((4, 4), 5e-9), rtol=1e-3, atol=1e-12
        )
        scaler.step(optimizer)
        scaler.update()
    assert scaler.steps == 2


@pytest.mark.parametrize("region", ["amphal", "ops", "torch", "decorator"])
def test_every_kind_of_region(region: str) -> None:
    """With a policy, decorated, and torch's own where the loss is scaled in it."""
    scaler = amphal.GradScaler("cpu")
    model, _ = linear()
    if region == "torch":
        with torch.autocast("cpu", torch.float16):
            backward(scaler, None, model, region=torch.autocast("cpu", torch.float16))
    elif region == "decorator":
        loss = amphal.autocast("cpu", "fp16")(model)(torch.ones(1, 4)).float().sum()
        scaler.scale(loss * SMALL).backward()
    else:
        ops = {"softmax": "fp32"} if region == "ops" else None
        backward(scaler, None, model, region=amphal.autocast("cpu", "fp16", ops=ops))
    assert scaler.is_enabled()
    assert model.weight.grad is not None
    assert float(model.weight.grad.abs().max()) > 1e-5


@pytest.mark.parametrize("inside", [True, False], ids=["made inside", "made outside"])
def test_a_region_in_a_compiled_function(inside: bool) -> None:
    """The region is entered in the graph; it is seen where it is made."""
    torch.compiler.reset()
    amphal.detect.cache_clear()  # a region of an earlier test would be found, not made
    scaler = amphal.GradScaler("cpu")
    model, _ = linear()
    made = None if inside else amphal.autocast("cpu", "fp16")

    @torch.compile(backend="eager")
    def forward(x: torch.Tensor) -> torch.Tensor:
        with amphal.autocast("cpu", torch.float16) if made is None else made:
            return model(x)

    scaler.scale(forward(torch.ones(1, 4)).float().sum() * SMALL).backward()
    assert scaler.is_enabled()


def test_a_bf16_loop_with_float16_evaluation_stays_unscaled() -> None:
    """What counts is the outermost region before the loss, not one of the past."""
    scaler = amphal.GradScaler("cpu")
    model, optimizer = linear()
    for _ in range(2):
        backward(scaler, "bf16", model)
        assert not scaler.is_enabled()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad(), amphal.autocast("cpu", "fp16"):
            model(torch.ones(1, 4))


def test_a_float16_part_of_a_bf16_forward_counts() -> None:
    """And a float32 island in a float16 region leaves it a float16 region."""
    for outer, inner in (("bf16", "fp16"), ("fp16", "fp32")):
        scaler = amphal.GradScaler("cpu")
        model, _ = linear()
        with amphal.autocast("cpu", outer), amphal.autocast("cpu", inner):
            y = model(torch.ones(1, 4))
        scaler.scale(y.float().sum()).backward()
        assert scaler.is_enabled()


def test_off_is_off() -> None:
    """``enabled=False`` never scales."""
    scaler = amphal.GradScaler("cpu", enabled=False)
    model, _ = linear()
    backward(scaler, "fp16", model)
    assert not scaler.is_enabled()


def test_scaled_and_unscaled_losses_of_one_iteration_are_refused() -> None:
    """The first loss was not scaled; nothing has changed, and the next iteration may scale."""
    scaler = amphal.GradScaler("cpu")
    model, optimizer = linear()
    backward(scaler, "bf16", model)
    with pytest.raises(ScalerStateError, match="enabled=True"):
        backward(scaler, "fp16", model)
    assert not scaler.is_enabled()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    backward(scaler, "fp16", model)
    assert scaler.is_enabled()


def test_a_state_that_was_loaded_before_counts() -> None:
    """A checkpoint of an fp16 run, loaded where the plan is bf16: its scale is the first one."""
    source = amphal.GradScaler("cpu", enabled=True, init_scale=1024.0)
    scaler = amphal.GradScaler("cpu")
    scaler.load_state_dict(source.state_dict())
    assert not scaler.is_enabled()
    scaler = pickle.loads(pickle.dumps(scaler))
    model, _ = linear()
    backward(scaler, "fp16", model)
    assert scaler.get_scale() == 1024.0


def test_hardware_that_saturates_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no scaler can see an overflow, a float16 loss is not scaled and not passed on."""
    scaler = amphal.GradScaler("cpu")
    model, _ = linear()
    blind = ScalerSupport(
        native_kernels=True, fp64=True, detects_overflow=False, fused_optimizers=True
    )
    monkeypatch.setattr(arguments, "support_of", lambda plan: (blind, None))
    with pytest.raises(ArgumentError, match="saturates"):
        backward(scaler, "fp16", model)
    assert not scaler.is_enabled()
