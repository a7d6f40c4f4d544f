"""The gradient monitor: norms, spikes, what is not finite, and skipping, with no host sync."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.scaler import Syncs, problem, scaler_of

import amphal
from amphal.errors import ArgumentError, ArgumentTypeError, ScalerStateError


def feed(monitor: Any, param: torch.nn.Parameter, norms: list[float], **kwargs: Any) -> Any:
    found = []
    for norm in norms:
        param.grad = torch.tensor([norm, 0.0, 0.0])
        found.append(monitor.observe(**kwargs))
    return found


def steady(count: int, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return (1 + 0.2 * torch.rand(count, generator=generator)).tolist()


def test_the_norm_is_the_norm_of_the_gradients() -> None:
    """For a model and for an optimizer, whatever the shapes."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(2, 3)).sum().backward()
    expected = torch.nn.utils.get_total_norm(
        [p.grad for p in net.parameters() if p.grad is not None]
    )
    for watched in (net, optimizer):
        health = amphal.GradMonitor(watched).observe()
        assert health.norm == pytest.approx(float(expected))
        assert health.finite
        assert health.ok
        assert math.isnan(health.usual)


def test_a_spike_stands_out_from_the_usual_norms() -> None:
    """Ten times the usual norm is a spike, a fifth more is not, and it is one number's business."""
    param, _ = problem()
    monitor = amphal.GradMonitor(torch.nn.ParameterList([param]), window=32)
    assert not any(h.spike for h in feed(monitor, param, steady(100)))
    (spike,) = feed(monitor, param, [10.0])
    assert spike.spike
    assert not spike.ok
    assert spike.usual == pytest.approx(1.1, rel=0.1)
    assert not any(h.spike for h in feed(monitor, param, [1.3, 0.01, 0.0]))
    assert (monitor.spikes, monitor.nonfinite) == (1, 0)
    assert "spike" in repr(spike)


def test_a_lasting_change_of_level_becomes_the_usual_one() -> None:
    """When half of the window has seen the new level it is no longer a spike."""
    param, _ = problem()
    monitor = amphal.GradMonitor(torch.nn.ParameterList([param]), window=16, warmup=8)
    feed(monitor, param, steady(32))
    health = feed(monitor, param, [30.0] * 16)
    assert health[0].spike
    assert not health[-1].spike


def test_nothing_is_a_spike_during_the_warm_up() -> None:
    """The first norms of a run are no norm to judge by."""
    param, _ = problem()
    monitor = amphal.GradMonitor(torch.nn.ParameterList([param]), warmup=8)
    assert not any(h.spike for h in feed(monitor, param, [1.0, 100.0, 1.0, 1e5, 1.0]))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen_and_not_remembered(bad: float) -> None:
    """It counts, and the usual norm stays what it was."""
    param, _ = problem()
    monitor = amphal.GradMonitor(torch.nn.ParameterList([param]))
    feed(monitor, param, steady(20))
    before = feed(monitor, param, [1.0])[0].usual
    health = feed(monitor, param, [bad] * 200)
    assert not health[0].finite
    assert not health[0].spike
    after = feed(monitor, param, [1.0])[0]
    assert after.usual == pytest.approx(before, rel=0.05)
    assert after.ok
    assert monitor.nonfinite == 200


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("skip", "skips"),
    [("none", (False, False)), ("nonfinite", (True, False)), ("spike", (True, True))],
)
def test_a_step_is_skipped_as_asked(fused: bool, skip: str, skips: tuple[bool, bool]) -> None:
    """Without a scaler: nothing, what is not finite, or spikes as well."""
    param, optimizer = problem(fused, kind=torch.optim.SGD)
    monitor = amphal.GradMonitor(optimizer, skip=skip)
    feed(monitor, param, steady(20))
    for gradient, skipped in zip((math.nan, 50.0), skips, strict=True):
        before = param.detach().clone()
        param.grad = torch.full((3,), gradient)
        monitor.step(optimizer)
        assert monitor.outcome.skipped is skipped
        assert torch.equal(param, before) is skipped
        with torch.no_grad():
            param.fill_(1.0)
    assert monitor.skipped == sum(skips)
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("fused", [False, True])
def test_with_a_scaler_the_norm_is_unscaled_and_overflow_is_the_scalers(
    fused: bool, memory: str
) -> None:
    """A spike skips without moving the scale; an overflow skips and backs off."""
    param, optimizer = problem(fused)
    scaler = scaler_of()
    monitor = amphal.GradMonitor(optimizer, skip="spike")
    scaler.scale(torch.ones(()))
    for gradient in [*steady(20), 50.0, math.inf]:
        before = param.detach().clone()
        param.grad = torch.tensor([gradient, 0.0, 0.0]) * 65536
        monitor.step(optimizer, scaler)
        scaler.update()
        assert torch.equal(param, before) is (gradient > 2)
        assert scaler.outcome(optimizer).skipped is (gradient > 2)
        if gradient == 50.0:
            assert monitor.last.norm == 50.0
            assert monitor.last.spike
            assert scaler.get_scale() == 65536.0
    assert scaler.get_scale() == 32768.0
    assert (scaler.steps, scaler.skipped) == (21, 1)
    assert (monitor.spikes, monitor.nonfinite, monitor.skipped) == (1, 1, 1)


@pytest.mark.parametrize("fused", [False, True])
def test_the_norm_is_right_before_and_after_unscaling(fused: bool) -> None:
    """observe(scaler) knows whether the gradients still carry the scale; clipping can tell it."""
    param, optimizer = problem(fused)
    scaler = scaler_of()
    monitor = amphal.GradMonitor(optimizer)
    scaler.scale(torch.ones(()))
    param.grad = torch.tensor([3.0, 0.0, 4.0]) * 65536
    assert monitor.observe(scaler).norm == 5.0
    norm = scaler.clip_grad_norm_(optimizer, 100.0)
    assert monitor.observe(scaler).norm == 5.0
    assert monitor.observe(norm=norm).norm == 5.0
    scaler.step(optimizer)
    scaler.update()
    param.grad = torch.tensor([3.0, 0.0, 4.0]) * 65536
    scaler.unscale_(optimizer)
    assert monitor.observe(scaler).norm == 5.0
    torchs = torch.amp.GradScaler("cpu")
    torchs.scale(torch.ones(()))
    param.grad = torch.tensor([3.0, 0.0, 4.0]) * 65536
    assert monitor.observe(torchs).norm == 5.0
    with pytest.raises(ArgumentTypeError, match=r"scaler must be an amphal\.GradScaler"):
        monitor.step(optimizer, torchs)


@pytest.mark.parametrize("fused", [False, True])
def test_a_disabled_scaler_is_no_scaler(fused: bool) -> None:
    """The bf16 loop passes its disabled scaler; the outcome is kept there too."""
    param, optimizer = problem(fused)
    scaler = amphal.GradScaler("cpu", enabled=False)
    monitor = amphal.GradMonitor(optimizer)
    param.grad = torch.full((3,), math.nan)
    monitor.step(optimizer, scaler)
    assert scaler.outcome(optimizer).skipped
    assert torch.equal(param, torch.ones(3))


@pytest.mark.parametrize(("fused", "expected"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("scaled", [False, True])
def test_host_syncs(fused: bool, expected: int, scaled: bool, memory: str) -> None:
    """Observing costs none; a fused step none, another one as without the monitor."""
    param, optimizer = problem(fused)
    monitor = amphal.GradMonitor(optimizer, skip="spike")
    scaler = scaler_of() if scaled else None
    if scaler is not None:
        scaler.scale(torch.ones(()))
    for _ in range(4):
        param.grad = torch.ones(3)
        with Syncs() as bare:
            optimizer.step()
        with Syncs() as syncs:
            monitor.step(optimizer, scaler)
        if scaler is not None:
            scaler.update()
        assert syncs.count - bare.count == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((3,), {}, "model_or_optimizer must be"),
        ((torch.nn.Linear(1, 1),), {"window": 2}, "window must be an int of 3 or more"),
        ((torch.nn.Linear(1, 1),), {"threshold": 0}, "threshold must be more than 0"),
        ((torch.nn.Linear(1, 1),), {"warmup": 1000}, "warmup must be an int from 2 to 128"),
        ((torch.nn.Linear(1, 1),), {"skip": True}, "skip must be 'none', 'nonfinite' or 'spike'"),
    ],
)
def test_bad_arguments(
    args: tuple[int] | tuple[torch.nn.Module], kwargs: dict[str, Any], words: str
) -> None:
    """Each argument has a rule, and the message says it."""
    with pytest.raises(amphal.AmphalError, match=words):
        amphal.GradMonitor(*args, **kwargs)


def test_asking_too_early_names_the_missing_call() -> None:
    """last and outcome need an observation and a step."""
    monitor = amphal.GradMonitor(torch.nn.Linear(1, 1))
    with pytest.raises(ScalerStateError, match=r"call observe\(\) or step\(\) first"):
        _ = monitor.last
    with pytest.raises(ScalerStateError, match=r"call step\(optimizer\) first"):
        _ = monitor.outcome
    assert (monitor.spikes, monitor.nonfinite, monitor.skipped) == (0, 0, 0)
    assert monitor.observe().norm == 0.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("vetoed", [False, True])
def test_two_optimizers_of_one_model(fused: bool, vetoed: bool) -> None:
    """After the first was stepped, or held back as a spike, the norm is still that of the whole."""
    a, b = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    first, second = (torch.optim.SGD([p], lr=1e-9, fused=fused) for p in (a, b))
    scaler = scaler_of()
    monitor = amphal.GradMonitor(torch.nn.ParameterList([a, b]), skip="spike", warmup=3)
    if vetoed:
        for norm in (1.0, 1.1, 0.9):
            monitor.observe(norm=torch.tensor(norm))
    scaler.scale((a * 30 + b * 40).sum()).backward()
    for optimizer in (first, second):
        monitor.step(optimizer, scaler)
        assert monitor.last.norm == pytest.approx(50.0)
        assert scaler.outcome(optimizer).skipped is vetoed


def test_torchs_scaler_with_two_optimizers() -> None:
    """A watched optimizer is found by identity; for a module it cannot be told, which is said."""
    a, b = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    first, second = (torch.optim.SGD([p], lr=1e-9) for p in (a, b))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((a * 2 + b * 3).sum()).backward()
    module = amphal.GradMonitor(torch.nn.ParameterList([a, b]))
    assert module.observe(scaler).norm == pytest.approx(math.sqrt(13))
    scaler.step(first)
    assert amphal.GradMonitor(second).observe(scaler).norm == 3.0
    assert amphal.GradMonitor(first).observe(scaler).norm == 2.0
    with pytest.raises(ArgumentError, match="Watch the optimizer"):
        module.observe(scaler)


def test_the_default_dtype_does_not_matter() -> None:
    """Counts are integers: bfloat16 would stop at 256."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        monitor = amphal.GradMonitor(torch.nn.Linear(1, 1))
        for _ in range(300):
            health = monitor.observe(norm=torch.tensor(math.nan))
    finally:
        torch.set_default_dtype(torch.float32)
    assert monitor.nonfinite == 300
    assert health.tensor.dtype is torch.float32


@pytest.mark.parametrize("fused", [False, True])
def test_a_spike_on_another_rank_skips_here_too(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The veto goes through the group's agreement (a stand-in for the all-reduce)."""
    param, optimizer = problem(fused)
    scaler, reduced = scaler_of(), []
    scaler._process_group = "a group"

    def all_reduce(flags: torch.Tensor) -> torch.Tensor:
        reduced.append(flags.tolist())
        return torch.tensor([0.0, 1.0])  # the other rank's veto

    monkeypatch.setattr(scaler, "_all_reduce", all_reduce)
    scaler.scale(param.sum()).backward()
    amphal.GradMonitor(optimizer, skip="spike").step(optimizer, scaler)
    assert reduced == [[0.0, 0.0]]  # overflow and veto in one collective
    assert scaler.outcome(optimizer).skipped
    assert torch.equal(param.detach(), torch.ones(3))
