"""The same facts on a real device: the CPU, or the one that AMPHAL_TEST_DEVICE names.

A named device that is not there fails; nothing here is skipped.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import amphal

DEVICE = os.environ.get("AMPHAL_TEST_DEVICE", "cpu")


@pytest.fixture(autouse=True)
def _named_dtypes_may_be_slow_here() -> Iterator[None]:
    amphal.detect.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        yield
    assert not torch.is_autocast_enabled(DEVICE)


def precisions() -> list[str]:
    """Every precision that this device can do; a device that is not there gives its error."""
    support = amphal.detect(DEVICE).support
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return [name for name, dtype in names.items() if support[dtype].level != "absent"]


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4)
    ).to(DEVICE)


def test_the_device_is_there_and_explained() -> None:
    """detect() finds it, probes it, and its plan says why."""
    plan = amphal.detect(DEVICE)
    assert plan.device.type == DEVICE
    assert plan.hardware.name
    assert plan.reasons
    assert torch.ones(2, device=plan.device).sum().item() == 2


def test_a_model_trains_in_every_precision_that_the_device_can_do() -> None:
    """The loop of the README, scaler included: the loss falls and the weights stay finite."""
    for precision in precisions():
        plan = amphal.detect(DEVICE, precision=precision)
        model = _model()
        fused = plan.fused_optimizers
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = amphal.GradScaler(plan)
        x = torch.randn(64, 16, device=plan.device)
        y = (x[:, :4] > 0).float().argmax(1)
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            with amphal.autocast(plan):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        assert losses[-1] < 0.7 * losses[0], (precision, losses[0], losses[-1])
        assert all(p.isfinite().all() for p in model.parameters())


def test_an_overflow_is_skipped_and_the_scale_falls() -> None:
    """An inf in the gradients leaves the weights as they were, and training goes on."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amphal.GradScaler(DEVICE, init_scale=2.0**10, enabled=True)
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(8, 16, device=DEVICE)
    scaler.scale(model(x).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_regions_nest_and_restore_on_the_device() -> None:
    """The casts of a matrix product follow the region, and end with it."""
    x = torch.ones(8, 8, device=DEVICE)
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for outer in precisions():
        for inner in precisions():
            with amphal.autocast(DEVICE, outer):
                with amphal.autocast(DEVICE, inner):
                    assert (x @ x).dtype is names[inner]
                assert (x @ x).dtype is names[outer]
    assert (x @ x).dtype is torch.float32


def test_every_spelling_of_the_device() -> None:
    """With an index, without one, as torch.device, as a plan: the same device."""
    x = torch.ones(8, 8, device=DEVICE)
    for spelling in (DEVICE, f"{DEVICE}:0", torch.device(DEVICE), torch.device(DEVICE, 0)):
        with amphal.autocast(spelling, "fp32"):
            assert (x @ x).dtype is torch.float32
        assert amphal.detect(spelling).device.type == DEVICE


def test_a_scalers_state_moves_to_the_cpu_and_back() -> None:
    """A checkpoint written on the device continues on the CPU, and the other way round."""
    source = amphal.GradScaler(DEVICE, init_scale=2.0**7, enabled=True)
    for target in ("cpu", DEVICE):
        other = amphal.GradScaler(target, enabled=True)
        other.load_state_dict(source.state_dict())
        assert other.get_scale() == 2.0**7
        source = other


def test_tune_measures_here_and_leaves_nothing_behind() -> None:
    """A training step in every precision: all are tried, one is chosen, the state is as before."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 16, device=DEVICE)
    first: dict[torch.dtype, float] = {}

    def step(plan: amphal.Plan, scaler: amphal.GradScaler) -> torch.Tensor:
        optimizer.zero_grad()
        with plan.autocast():
            loss = (model(x) + torch.rand(1, device=DEVICE)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        first.setdefault(plan.dtype, float(loss.detach()))
        return loss

    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = amphal.tune(step, device=DEVICE, candidates=precisions(), budget_s=0.5)
    assert plan.device.type == DEVICE
    assert plan.measured is not None
    assert {row.candidate for row in plan.measured} == set(precisions())
    assert all(loss == pytest.approx(first[torch.float32], rel=0.05) for loss in first.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
