"""The scaler's arguments, bounds, collapse, order of calls, outcomes and shared decisions."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.scaler import Syncs, backward, iterate, problem, scaler_of

import amphal
from amphal._scaler import outcome as _outcome
from amphal.errors import ArgumentError, ArgumentTypeError, ScaleCollapseError, ScalerStateError


def test_it_is_torchs_scaler() -> None:
    """isinstance holds, and the attributes that other libraries read are there from the start."""
    scaler = scaler_of()
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler._scale is None
    assert scaler._growth_tracker is None
    assert scaler._init_scale == 65536.0
    assert scaler._enabled is True
    assert len(scaler._per_optimizer_states) == 0
    assert scaler._device == "cpu"


def test_torchs_order_of_arguments_is_kept() -> None:
    """Positional arguments mean what they mean in torch.amp.GradScaler."""
    scaler = amphal.GradScaler("cpu", 2.0, 3.0, 0.25, 7, True)
    assert scaler.state_dict()["scale"] == 2.0
    assert scaler.get_growth_factor() == 3.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 7
    assert scaler.is_enabled()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_enabled_follows_the_plan(precision: str) -> None:
    """Without enabled=, the scaler is on exactly where the plan asks for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = amphal.detect("cpu", precision=precision)
    assert amphal.GradScaler(plan).is_enabled() is (precision == "fp16")
    assert plan.grad_scaler().is_enabled() is (precision == "fp16")
    assert amphal.GradScaler(plan, enabled=True).is_enabled()


@pytest.mark.parametrize(
    ("kwargs", "builtin", "words"),
    [
        ({"growth_factor": 1.0}, ArgumentError, "growth_factor must be more than 1"),
        ({"growth_factor": math.inf}, ArgumentError, "growth_factor"),
        ({"growth_factor": "2"}, TypeError, "growth_factor"),
        ({"backoff_factor": 1.0}, ArgumentError, "backoff_factor must be more than 0"),
        ({"backoff_factor": 0.0}, ArgumentError, "backoff_factor"),
        ({"backoff_factor": math.nan}, ArgumentError, "backoff_factor"),
        ({"growth_interval": 0}, ArgumentError, "growth_interval must be an int"),
        ({"growth_interval": 2.0}, TypeError, "growth_interval"),
        ({"growth_interval": True}, TypeError, "growth_interval"),
        ({"init_scale": 0.0}, ArgumentError, "init_scale must be from min_scale"),
        ({"init_scale": math.inf}, ValueError, "init_scale"),
        ({"init_scale": -1.0}, ValueError, "init_scale"),
        ({"init_scale": math.nan}, ValueError, "init_scale"),
        ({"min_scale": 2.0**-127}, ValueError, "min_scale must be from 2\\*\\*-126"),
        ({"max_scale": math.inf}, ValueError, "max_scale"),
        ({"max_scale": 1e39}, ValueError, "max_scale"),
        ({"min_scale": 2.0, "max_scale": 1.0}, ValueError, "at most max_scale"),
        ({"max_scale": 1024.0}, ValueError, "init_scale must be from min_scale"),
        ({"hysteresis": 0}, ValueError, "hysteresis"),
        ({"max_consecutive_skips": -1}, ValueError, "max_consecutive_skips"),
        ({"max_consecutive_skips": 1.5}, TypeError, "max_consecutive_skips"),
        ({"process_group": "world"}, TypeError, "process_group"),
        ({"model": "net"}, TypeError, "model must be a torch.nn.Module"),
        ({"on_skip": 3}, TypeError, "on_skip"),
        ({"enabled": 1}, TypeError, "enabled must be True, False or None"),
    ],
)
def test_a_bad_argument_is_refused_by_its_rule(
    kwargs: dict[str, Any], builtin: type[Exception], words: str
) -> None:
    """Each argument has a rule, and the message says it; torch's kind of error is kept."""
    with pytest.raises(amphal.AmphalError, match=words) as caught:
        amphal.GradScaler("cpu", **{"enabled": True, **kwargs})
    assert isinstance(caught.value, builtin)


@pytest.mark.parametrize("device", [65536.0, 3, "gpu", [], "cpu:x"])
def test_a_bad_device_is_refused(device: Any) -> None:
    """Something that is no device is an error, also the old order with init_scale first."""
    with pytest.raises(amphal.AmphalError):
        amphal.GradScaler(device)


def test_setters_hold_the_same_rules() -> None:
    """A value that the constructor refuses is refused by its setter, and nothing changes."""
    scaler = scaler_of()
    refused: list[tuple[Callable[[Any], None], Any]] = [
        (scaler.set_growth_factor, 1.0),
        (scaler.set_backoff_factor, 1.0),
        (scaler.set_growth_interval, 0),
    ]
    for setter, bad in refused:
        with pytest.raises(ArgumentError):
            setter(bad)
    assert scaler.get_growth_factor() == 2.0
    assert scaler.get_backoff_factor() == 0.5
    assert scaler.get_growth_interval() == 2000


def test_a_shorter_growth_interval_than_the_run_so_far_still_grows() -> None:
    """torch compares for equality and would never grow again."""
    param, optimizer = problem()
    scaler = scaler_of()
    for _ in range(5):
        iterate(scaler, param, optimizer)
    scaler.set_growth_interval(3)
    iterate(scaler, param, optimizer)
    assert scaler.get_scale() == 131072.0


@pytest.mark.parametrize(
    "value",
    [0.0, -1.0, math.inf, math.nan, 1e-40, True, "1", None.__class__, torch.ones(2)]
    + [torch.tensor(math.nan), torch.tensor(3), torch.ones(1, requires_grad=True)],
)
def test_update_refuses_what_is_no_scale(value: Any) -> None:
    """new_scale must be a finite number inside the bounds; the scale stays as it was."""
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    with pytest.raises(amphal.AmphalError, match="new_scale"):
        scaler.update(value)
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("value", [3, 2.5, torch.tensor(8.0), torch.tensor([16.0])])
def test_update_takes_numbers_and_tensors(value: float | torch.Tensor) -> None:
    """An int is a number too, which torch's own update does not know."""
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    scaler.update(value)
    assert scaler.get_scale() == float(value)


def test_scale_takes_nested_outputs_and_refuses_the_rest() -> None:
    """Lists, tuples, named tuples and iterators of tensors are scaled; a string is refused."""
    from collections import namedtuple

    pair = namedtuple("pair", "a b")
    scaler = scaler_of(init_scale=2.0)
    one = torch.ones(())
    assert scaler.scale([one, (one,)]) == [2.0, (2.0,)]
    assert scaler.scale(pair(one, one)) == pair(2.0, 2.0)
    assert [float(v) for v in scaler.scale(iter([one, one]))] == [2.0, 2.0]
    for wrong in ("loss", 3.0, {"a": one}, None):
        with pytest.raises(ValueError, match="outputs must be a tensor") as caught:
            scaler.scale(wrong)
        assert isinstance(caught.value, amphal.AmphalError)


# ---- the order of calls ------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_missing_call_is_named(fused: bool) -> None:
    """Before scale() every method says so; update() without a step says so."""
    param, optimizer = problem(fused)
    scaler = scaler_of()
    for call in (
        lambda: scaler.unscale_(optimizer),
        lambda: scaler.step(optimizer),
        lambda: scaler.clip_grad_norm_(optimizer, 1.0),
        lambda: scaler.update(),
    ):
        with pytest.raises(ScalerStateError, match=r"scaler\.scale\(loss\)\.backward\(\)"):
            call()
    backward(scaler, param)
    with pytest.raises(AssertionError, match=r"call scaler\.step\(optimizer\) first"):
        scaler.update()
    with pytest.raises(ScalerStateError, match="has not stepped"):
        scaler.outcome(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_repeated_call_is_named(fused: bool) -> None:
    """Unscaling twice, after the step, and stepping twice are errors that say what to do."""
    param, optimizer = problem(fused)
    scaler = scaler_of()
    backward(scaler, param)
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerStateError, match=r"after unscale_\(\)"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    for call in (scaler.unscale_, scaler.step, lambda o: scaler.clip_grad_norm_(o, 1.0)):
        with pytest.raises(RuntimeError, match=r"call scaler\.update\(\) first"):
            call(optimizer)
    scaler.update()
    iterate(scaler, param, optimizer)


def test_something_that_is_no_optimizer_is_refused() -> None:
    """unscale_, step and step_all ask for an optimizer."""
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    for call in (scaler.step, scaler.unscale_, lambda o: scaler.step_all([o])):
        with pytest.raises(ArgumentTypeError, match="optimizer must be"):
            call(torch.ones(1))  # type: ignore[arg-type]
    _, optimizer = problem()
    for wrong in ([], [optimizer, optimizer]):
        with pytest.raises(ArgumentError, match="one or more different"):
            scaler.step_all(wrong)


@pytest.mark.parametrize("fused", [False, True])
def test_an_exception_in_the_step_leaves_no_attribute_behind(fused: bool) -> None:
    """A fused optimizer that raises keeps neither grad_scale nor found_inf."""
    param, optimizer = problem(fused)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("in the step")

    optimizer.register_step_pre_hook(fail)
    scaler = scaler_of()
    backward(scaler, param)
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


# ---- bounds and collapse -----------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_endless_overflow_cannot_reach_the_weights(fused: bool, memory: str) -> None:
    """Torch's scale falls to 0 and the next clean batch writes NaN; this one stops at the floor."""
    param, optimizer = problem(fused)
    scaler = scaler_of()
    collapsed = 0
    for _ in range(200):
        try:
            iterate(scaler, param, optimizer, math.nan)
        except ScaleCollapseError:
            collapsed += 1
    assert collapsed > 0
    assert scaler.get_scale() == 2.0**-126
    assert torch.equal(param, torch.ones(3))
    param.grad = torch.full((3,), 2.0**-126)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.outcome(optimizer).stepped
    assert param.isfinite().all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("gradient", [1e10, 3e38, -3e38, math.inf])
@pytest.mark.parametrize("explicit", ["step", "unscale", "clip"])
def test_unscaling_cannot_overflow_unseen(
    fused: bool, gradient: float, explicit: str, memory: str
) -> None:
    """A finite gradient whose unscaled value is not finite skips the step."""
    param, optimizer = problem(fused, lr=0.0, kind=torch.optim.SGD, momentum=0.5)
    scaler = scaler_of(init_scale=2.0**-100)
    scaler.scale(torch.ones(()))
    for value in (gradient, 2.0**-100):
        param.grad = torch.full((3,), value)
        if explicit == "unscale":
            scaler.unscale_(optimizer)
        elif explicit == "clip":
            scaler.clip_grad_norm_(optimizer, 1e9)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.outcome(optimizer).skipped is (value == gradient)
        assert param.isfinite().all()
    assert optimizer.state[param]["momentum_buffer"].isfinite().all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("poison", [0.0, math.inf, math.nan, 1e-45])
def test_a_scale_that_others_wrote_cannot_corrupt(fused: bool, poison: float, memory: str) -> None:
    """A scale of 0, inf or NaN, written from outside, skips instead of dividing by it."""
    param, optimizer = problem(fused)
    scaler = scaler_of()
    iterate(scaler, param, optimizer)
    before = param.detach().clone()
    assert scaler._scale is not None
    scaler._scale.fill_(poison)
    param.grad = torch.ones(3)
    scaler.step(optimizer)
    assert param.isfinite().all()
    if poison != math.inf:  # every gradient divided by inf is 0, which is finite
        assert torch.equal(param, before)


def test_max_scale_stops_growth() -> None:
    """Growth ends at max_scale, exactly."""
    param, optimizer = problem()
    scaler = scaler_of(init_scale=4.0, max_scale=10.0, growth_interval=1)
    scales = []
    for _ in range(3):
        iterate(scaler, param, optimizer)
        scales.append(scaler.get_scale())
    assert scales == [8.0, 10.0, 10.0]


@pytest.mark.parametrize("fused", [False, True])
def test_growth_stops_inside_float32(fused: bool, memory: str) -> None:
    """By default the scale grows as torch's does and never to inf."""
    param, optimizer = problem(fused)
    scaler = scaler_of(init_scale=2.0**125, growth_interval=1)
    for _ in range(5):
        param.grad = None
        scaler.scale(param.sum() * 0.0).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**127


def test_min_scale_is_a_floor() -> None:
    """Backing off ends at min_scale, exactly; the overflow after that is the collapse."""
    param, optimizer = problem()
    scaler = scaler_of(init_scale=8.0, min_scale=3.0)
    iterate(scaler, param, optimizer, math.inf)
    iterate(scaler, param, optimizer, math.inf)
    assert scaler.get_scale() == 3.0
    with pytest.raises(ScaleCollapseError, match="at its floor"):
        iterate(scaler, param, optimizer, math.inf)
    assert scaler.get_scale() == 3.0
    iterate(scaler, param, optimizer)
    assert scaler.outcome(optimizer).stepped


def test_growth_away_from_the_floor_is_not_a_collapse() -> None:
    """An overflow with the scale above its floor never counts as one at the floor."""
    param, optimizer = problem()
    scaler = scaler_of(init_scale=4.0, min_scale=4.0, growth_interval=1)
    iterate(scaler, param, optimizer)
    iterate(scaler, param, optimizer, math.inf)
    assert scaler.get_scale() == 4.0


def test_hysteresis_tolerates_overflows() -> None:
    """With hysteresis=2 the first overflow leaves the scale alone, the next ones back off."""
    param, optimizer = problem()
    scaler = scaler_of(init_scale=64.0, hysteresis=2, growth_interval=2)
    scales = []
    for gradient in (math.inf, math.inf, math.inf, 1.0, 1.0, math.inf, math.inf):
        iterate(scaler, param, optimizer, gradient)
        scales.append(scaler.get_scale())
    assert scales == [64.0, 32.0, 16.0, 16.0, 32.0, 32.0, 16.0]


def test_max_consecutive_skips_names_the_parameters() -> None:
    """More overflows in a row than allowed raise, with qualified names of what was not finite."""
    last = torch.nn.Linear(2, 1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = scaler_of(max_consecutive_skips=1, model=model)

    def run(bad: bool) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        if bad:
            assert last.bias.grad is not None
            last.bias.grad.fill_(math.nan)
        scaler.step(optimizer)
        scaler.update()

    for bad in (True, False, True):
        run(bad)
    with pytest.raises(ScaleCollapseError, match=r"2 steps in a row.*: 1\.bias\."):
        run(True)
    assert scaler.consecutive_skips == 2
    run(False)
    assert scaler.consecutive_skips == 0


def test_a_higher_limit_waits_at_the_floor_too() -> None:
    """max_consecutive_skips replaces the rule of the floor."""
    param, optimizer = problem()
    scaler = scaler_of(init_scale=1.0, min_scale=1.0, max_consecutive_skips=4)
    for _ in range(4):
        iterate(scaler, param, optimizer, math.inf)
    with pytest.raises(ScaleCollapseError, match="5 steps in a row"):
        iterate(scaler, param, optimizer, math.inf)


def test_without_a_model_the_place_in_the_optimizer_is_named() -> None:
    """Group, position and shape stand in for a name."""
    param, optimizer = problem()
    scaler = scaler_of(max_consecutive_skips=0)
    with pytest.raises(ArithmeticError, match=r"group 0, param 0, shape \(3,\)"):
        iterate(scaler, param, optimizer, math.inf)


def test_a_fused_collapse_appears_when_the_host_reads(memory: str) -> None:
    """Fused, the collapse is raised by the update after a read, and after 64 iterations at most."""
    param, optimizer = problem(True)
    scaler = scaler_of(init_scale=1.0, min_scale=1.0)
    iterate(scaler, param, optimizer, math.inf)
    assert scaler.skipped == 1
    with pytest.raises(ScaleCollapseError):
        iterate(scaler, param, optimizer, math.inf)
    quiet = 0
    with pytest.raises(ScaleCollapseError):
        for _ in range(200):
            iterate(scaler, param, optimizer, math.inf)
            quiet += 1
    assert quiet < _outcome.UNREAD_LIMIT
    assert torch.equal(param, torch.ones(3))


# ---- outcome, counters, schedulers -------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_the_outcome_is_told(fused: bool, memory: str) -> None:
    """stepped, skipped, nothing to do; and it can be read after update() as well."""
    param, optimizer = problem(fused)
    scaler = scaler_of()
    iterate(scaler, param, optimizer, 1.0)
    first = scaler.outcome(optimizer)
    iterate(scaler, param, optimizer, math.nan)
    second = scaler.outcome(optimizer)
    param.grad = None
    assert scaler.step(optimizer) is None
    scaler.update()
    third = scaler.outcome(optimizer)
    assert "not read yet" in repr(first) or not fused
    assert [str(o) for o in (first, second, third)] == ["stepped", "skipped", "nothing to do"]
    assert [bool(o) for o in (first, second, third)] == [True, False, False]
    assert (scaler.steps, scaler.skipped, scaler.consecutive_skips) == (1, 1, 1)


@pytest.mark.parametrize("fused", [False, True])
def test_no_gradients_at_all_change_nothing(fused: bool) -> None:
    """Where torch fails with "No inf checks were recorded", there is nothing to do."""
    _, optimizer = problem(fused)
    scaler = scaler_of(growth_interval=1)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536.0
    assert scaler.outcome(optimizer).nothing_to_do
    assert scaler.clip_grad_norm_(optimizer, 1.0) == 0.0
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_on_skip_is_called_with_the_iteration(fused: bool) -> None:
    """The hook learns which iterations were skipped, at the latest when somebody reads."""
    seen: list[int] = []
    param, optimizer = problem(fused)
    scaler = scaler_of(on_skip=seen.append)
    for gradient in (1.0, math.inf, 1.0, math.nan):
        iterate(scaler, param, optimizer, gradient)
    assert scaler.skipped == 2
    assert seen == [1, 3]


def test_a_disabled_scaler_answers_the_same_calls() -> None:
    """Everything works without scaling: the bf16 loop needs no branch."""
    param, optimizer = problem()
    scaler = amphal.GradScaler("cpu", enabled=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loss = param.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    assert scaler.clip_grad_norm_(optimizer, 1.0) == pytest.approx(3.0**0.5)
    assert param.grad is not None
    torch.testing.assert_close(param.grad.norm(), torch.tensor(1.0))
    scaler.step(optimizer)
    assert scaler.scheduler_step(scheduler)
    scaler.update()
    scaler.step_all([optimizer])
    scaler.update()
    assert scaler.outcome(optimizer).stepped
    assert (scaler.steps, scaler.skipped, scaler.get_scale()) == (2, 0, 1.0)
    assert scaler.state_dict() == {}


@pytest.mark.parametrize("fused", [False, True])
def test_a_scheduler_advances_only_with_the_optimizer(fused: bool) -> None:
    """The learning rates are torch's own for the steps that happened, with no false warning."""
    param, optimizer = problem(fused)
    reference = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    make = [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    ]
    mine, theirs = [m(optimizer) for m in make], [m(reference) for m in make]
    scaler = scaler_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gradient in (math.inf, 1.0, math.nan, 1.0, 1.0, math.inf, 1.0):
            iterate(scaler, param, optimizer, gradient)
            advanced = [scaler.scheduler_step(s) for s in mine]
            assert advanced == [math.isfinite(gradient)] * 2
            if math.isfinite(gradient):
                reference.step()
                for scheduler in theirs:
                    scheduler.step()
            assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]


def test_scheduler_step_passes_arguments_and_refuses_the_rest() -> None:
    """ReduceLROnPlateau gets its metric; something that is no scheduler is an error."""
    param, optimizer = problem()
    scaler = scaler_of()
    iterate(scaler, param, optimizer)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        assert scaler.scheduler_step(plateau, 1.0)
    assert optimizer.param_groups[0]["lr"] < 0.1
    with pytest.raises(ArgumentTypeError, match="scheduler must be"):
        scaler.scheduler_step(optimizer)


# ---- several optimizers, host syncs ------------------------------------------------------------


@pytest.mark.parametrize("fused", [(False, False), (True, True), (False, True)])
def test_step_all_decides_once_for_all(fused: tuple[bool, bool], memory: str) -> None:
    """An inf in one optimizer's gradients skips every one, and the scale backs off once."""
    pairs = [problem(f) for f in fused]
    optimizers = [optimizer for _, optimizer in pairs]
    scaler = scaler_of()
    for bad in (False, True, False):
        for index, (param, _) in enumerate(pairs):
            backward(scaler, param, math.inf if bad and index == 1 else 1.0)
        before = [param.detach().clone() for param, _ in pairs]
        scaler.step_all(optimizers)
        scaler.update()
        for (param, optimizer), old in zip(pairs, before, strict=True):
            assert scaler.outcome(optimizer).skipped is bad
            assert torch.equal(param, old) is bad
    assert scaler.get_scale() == 32768.0


@pytest.mark.parametrize(("fused", "expected"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("clip", [False, True])
def test_host_syncs_of_a_step(
    fused: bool, expected: int, count: int, clip: bool, transfers: list[int], memory: str
) -> None:
    """Fused none, unfused one for all optimizers together; clipping adds none."""
    pairs = [problem(fused) for _ in range(count)]
    optimizers = [optimizer for _, optimizer in pairs]
    scaler = scaler_of()

    def run() -> None:
        for param, optimizer in pairs:
            param.grad = torch.ones(3)
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step_all(optimizers)
        scaler.update()

    scaler.scale(torch.ones(()))
    for _ in range(5):
        run()
        with Syncs() as bare:
            for _, optimizer in pairs:
                optimizer.step()
        with Syncs() as syncs:
            run()
        assert syncs.count - bare.count == expected
    assert transfers == []


def test_host_transfers_of_a_long_fused_run(transfers: list[int], memory: str) -> None:
    """A fused run is read once in 64 iterations, so that a collapse cannot go unseen."""
    param, optimizer = problem(True)
    scaler = scaler_of()
    for _ in range(130):
        iterate(scaler, param, optimizer)
    assert len(transfers) == 2


def test_fused_sgd_may_skip_its_first_step() -> None:
    """torch's fused SGD keeps uninitialized momentum then; here the next steps are right."""
    results = []
    for fused in (False, True):
        param, optimizer = problem(fused, kind=torch.optim.SGD, momentum=0.9, dampening=0.5)
        scaler = scaler_of()
        for gradient in (math.inf, 1.0, 2.0, math.inf, 1.0):
            iterate(scaler, param, optimizer, gradient)
        results.append(param)
    torch.testing.assert_close(*results)


def test_a_step_inside_a_region_drops_the_cast_weights() -> None:
    """Autocast keeps casts of weights until its region ends; after a step they are old."""
    layer = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for enabled in (True, False):
        scaler = amphal.GradScaler("cpu", enabled=enabled)
        with amphal.autocast("cpu", "bf16") if enabled else torch.autocast("cpu"):
            first = layer(torch.ones(1, 2))
            scaler.scale(first.float().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            again = layer(torch.ones(1, 2))
        expected = torch.ones(1, 2) @ layer.weight.T
        torch.testing.assert_close(again.float(), expected, rtol=0.02, atol=0.02)
        optimizer.zero_grad()


def test_optimizers_of_the_older_contract_get_the_scaler() -> None:
    """A step that takes grad_scaler= is handed the scaler, with torch's FutureWarning."""

    class Own(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            grad_scaler.unscale_(self)
            if not any(bool(f) for f in grad_scaler._found_inf_per_device(self).values()):
                super().step(closure)

    param, optimizer = problem(None, kind=Own)
    scaler = scaler_of()
    for gradient, skipped in ((1.0, False), (math.inf, True)):
        backward(scaler, param, gradient)
        with pytest.warns(FutureWarning, match="grad_scaler"):
            scaler.step(optimizer)
        scaler.update()
        assert scaler.outcome(optimizer).skipped is skipped
    assert scaler.get_scale() == 32768.0
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.9))


@pytest.mark.parametrize("explicit", [False, True])
def test_a_grad_scale_that_the_user_set_is_kept(explicit: bool) -> None:
    """It multiplies the divisor of a fused optimizer, as in torch."""
    results = []
    for make in (lambda: scaler_of(), lambda: torch.amp.GradScaler("cpu")):
        param, optimizer = problem(True, kind=torch.optim.SGD)
        scaler = make()
        backward(scaler, param)
        optimizer.grad_scale = torch.tensor(4.0)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        results.append(param)
    assert torch.equal(*results)


def test_a_hook_that_raises_finds_the_iteration_ended() -> None:
    """The scale has moved, the step may be taken anew, and nothing is counted twice."""

    def hook(iteration: int) -> None:
        raise RuntimeError("hook")

    param, optimizer = problem()
    scaler = scaler_of(on_skip=hook)
    with pytest.raises(RuntimeError, match="hook"):
        iterate(scaler, param, optimizer, math.inf)
    assert scaler.get_scale() == 2.0**15
    iterate(scaler, param, optimizer)
    assert (scaler.steps, scaler.skipped) == (1, 1)


@pytest.mark.parametrize("fused", [False, True])
def test_setting_the_scale_does_not_hide_an_overflow(fused: bool) -> None:
    """update(new_scale) counts the iteration, tells on_skip and heeds the limit."""
    told: list[int] = []
    param, optimizer = problem(fused)
    scaler = scaler_of(on_skip=told.append, max_consecutive_skips=2)
    for _ in range(2):
        backward(scaler, param, math.inf)
        scaler.step(optimizer)
        scaler.update(1024.0)
    assert (scaler.steps, scaler.skipped, scaler.consecutive_skips) == (0, 2, 2)
    assert told == [0, 1]
    backward(scaler, param, math.inf)
    with pytest.raises(ScaleCollapseError):
        scaler.step(optimizer)
        scaler.update(1024.0)
        scaler.skipped
        backward(scaler, param)
        scaler.step(optimizer)
        scaler.update()


def test_a_flag_of_two_is_an_overflow_away_from_the_floor() -> None:
    """Flags that a hook has summed up are flags all the same."""
    param, optimizer = problem()
    scaler = scaler_of()
    backward(scaler, param, math.inf)
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {k: v * 2 for k, v in state["found_inf_per_device"].items()}
    scaler.update()
    assert scaler.skipped == 1
    iterate(scaler, param, optimizer)
    assert scaler.steps == 1


@pytest.mark.parametrize("call", ["step", "step_all", "unscale_"])
def test_refused_float16_parameters_leave_nothing_behind(call: str) -> None:
    """The scaler can be pickled after the error, and no other gradient was unscaled."""
    param, optimizer = problem()
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    refused = torch.optim.SGD([half], lr=0.1)
    scaler = scaler_of(init_scale=2.0)
    scaler.scale(param.sum() + half.float().sum()).backward()
    what = [optimizer, refused] if call == "step_all" else refused
    with pytest.raises(ArgumentError, match="float16"):
        getattr(scaler, call)(what)
    assert param.grad is not None
    assert torch.equal(param.grad, torch.full((3,), 2.0))
    pickle.dumps(scaler)


def test_numbers_beyond_a_float_are_refused() -> None:
    """An int of 400 digits is an error of this package everywhere."""
    huge = 10**400
    param, optimizer = problem()
    scaler = scaler_of()
    backward(scaler, param)
    for call in (
        lambda: scaler_of(init_scale=huge),
        lambda: scaler_of(growth_factor=huge),
        lambda: scaler_of(min_scale=huge),
        lambda: scaler.update(huge),
        lambda: scaler.clip_grad_norm_(optimizer, huge),
        lambda: scaler.clip_grad_norm_(optimizer, 1.0, huge),
    ):
        with pytest.raises(amphal.AmphalError, match="beyond 1e308"):
            call()


def test_an_optimizer_need_not_be_hashable() -> None:
    """Outcomes are kept by identity."""

    class Wrapper:
        __hash__: Any = None

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.param_groups, self.step = inner.param_groups, inner.step

    param, optimizer = problem()
    wrapper: Any = Wrapper(optimizer)
    scaler = scaler_of()
    iterate(scaler, param, wrapper)
    assert scaler.outcome(wrapper).stepped


def test_loading_a_state_tells_what_was_not_read_yet() -> None:
    """on_skip hears of a fused optimizer's skips before the counters are replaced."""
    told: list[int] = []
    param, optimizer = problem(fused=True)
    scaler = scaler_of(on_skip=told.append)
    iterate(scaler, param, optimizer, math.inf)
    scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    assert told == [0]
    assert scaler.skipped == 0
