"""State: saved, loaded whole or not at all, between devices, scalers and processes."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.scaler import iterate, problem, scaler_of

import amphal
from amphal.contract import Backend, get_backend
from amphal.contract import registry as _registry
from amphal.errors import ArgumentTypeError, BackendError, StateDictError


def used(gradients: Any = (1.0, math.inf, 1.0), **kwargs: Any) -> amphal.GradScaler:
    param, optimizer = problem()
    scaler = scaler_of(**kwargs)
    for gradient in gradients:
        iterate(scaler, param, optimizer, gradient)
    return scaler


def test_it_holds_torchs_entries_and_its_own() -> None:
    """Five entries that torch knows, one of this package, plain numbers all."""
    state = used().state_dict()
    assert state == {
        "scale": 32768.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 1,
        "amphal": {
            "version": 1,
            "steps": 2,
            "skipped": 1,
            "consecutive_skips": 0,
            "hysteresis_spent": 0,
        },
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == state


def test_to_and_from_torchs_scaler() -> None:
    """Either loads the other's state and goes on with the same numbers."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    ours = used()
    for other in (torch.amp.GradScaler("cpu"), ShardedGradScaler("cpu", process_group=None)):
        other.load_state_dict(ours.state_dict())
        assert other.get_scale() == 32768.0
        assert other._get_growth_tracker() == 1
        back = scaler_of()
        back.load_state_dict(other.state_dict())
        assert back.get_scale() == 32768.0
        assert back.state_dict()["_growth_tracker"] == 1


@pytest.mark.parametrize("started", [False, True])
def test_a_loaded_state_is_the_state(started: bool) -> None:
    """Whether or not a loss was scaled before, the next iterations go on from the saved one."""
    state = used(growth_interval=3, hysteresis=2).state_dict()
    assert state["amphal"]["hysteresis_spent"] == 1
    scaler = used((), hysteresis=2)
    param, optimizer = problem()
    if started:
        iterate(scaler, param, optimizer)
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    assert (scaler.steps, scaler.skipped, scaler.consecutive_skips) == (2, 1, 0)
    iterate(scaler, param, optimizer, math.inf)
    assert scaler.get_scale() == 32768.0  # the second overflow backs off


def test_between_enabled_and_disabled() -> None:
    """A disabled scaler keeps what it loaded; an empty state leaves an enabled one as it is."""
    state = used().state_dict()
    off = amphal.GradScaler("cpu", enabled=False)
    assert off.state_dict() == {}
    off.load_state_dict(state)
    assert off.state_dict() == state
    on = scaler_of()
    on.load_state_dict(off.state_dict())
    assert on.state_dict() == state
    on.load_state_dict(amphal.GradScaler("cpu", enabled=False).state_dict())
    assert on.state_dict() == state
    off.load_state_dict({})
    torch.amp.GradScaler("cpu", enabled=False).load_state_dict(off.state_dict())  # no error


GOOD = used().state_dict()
BAD = [
    ({"scale": 0.0}, ValueError, "scale must be from min_scale"),
    ({"scale": -1.0}, ValueError, "scale"),
    ({"scale": math.inf}, ValueError, "scale"),
    ({"scale": math.nan}, ValueError, "scale"),
    ({"scale": 2.0**-127}, ValueError, "scale"),
    ({"scale": "1"}, ValueError, "scale must be a number"),
    ({"scale": None}, ValueError, "scale"),
    ({"growth_factor": 0.5}, ValueError, "growth_factor"),
    ({"backoff_factor": 2.0}, ValueError, "backoff_factor"),
    ({"growth_interval": 0}, ValueError, "growth_interval"),
    ({"_growth_tracker": -1}, ValueError, "_growth_tracker"),
    ({"amphal": {**GOOD["amphal"], "version": 2}}, ValueError, "version 2"),
    ({"amphal": 7}, ValueError, "version 7"),
    ({"amphal": {**GOOD["amphal"], "steps": -1}}, ValueError, "steps"),
    ({"amphal": {"version": 1}}, ValueError, "has no steps"),
]


@pytest.mark.parametrize(("change", "builtin", "words"), BAD)
@pytest.mark.parametrize("enabled", [False, True])
def test_a_bad_state_is_refused_whole(
    change: dict[str, Any], builtin: type[Exception], words: str, enabled: bool
) -> None:
    """The error says which entry breaks which rule, and nothing was changed."""
    scaler = used((1.0,)) if enabled else amphal.GradScaler("cpu", enabled=False)
    before = scaler.state_dict()
    with pytest.raises(StateDictError, match=words) as caught:
        scaler.load_state_dict({**GOOD, **change})
    assert isinstance(caught.value, builtin)
    assert "Nothing was changed" in str(caught.value)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    "missing", ["scale", "growth_factor", "growth_interval", "_growth_tracker"]
)
def test_a_missing_entry_is_named(missing: str) -> None:
    """A sentence that names the entry, where torch raises a bare KeyError."""
    state = {k: v for k, v in GOOD.items() if k != missing}
    with pytest.raises(StateDictError, match=f"has no {missing}") as caught:
        scaler_of().load_state_dict(state)
    assert isinstance(caught.value, amphal.AmphalError)
    assert not str(caught.value).startswith("'")


def test_something_that_is_no_dict_is_refused() -> None:
    """A list is no state."""
    with pytest.raises(ArgumentTypeError, match="state_dict must be a dict"):
        scaler_of().load_state_dict([1])  # type: ignore[arg-type]


def test_a_state_outside_the_bounds_is_refused() -> None:
    """The scaler's own bounds hold for what it loads."""
    with pytest.raises(StateDictError, match=r"from min_scale \(.*\) to max_scale \(1024\)"):
        scaler_of(init_scale=1.0, max_scale=1024.0).load_state_dict(GOOD)


def test_a_tracker_beyond_the_interval_grows_at_the_next_step() -> None:
    """torch compares for equality and would never grow again."""
    scaler = scaler_of()
    scaler.load_state_dict({**GOOD, "growth_interval": 2, "_growth_tracker": 50})
    param, optimizer = problem()
    iterate(scaler, param, optimizer)
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("how", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
@pytest.mark.parametrize("enabled", [False, True])
def test_it_is_copied_and_pickled_between_iterations(
    how: Callable[..., Any], enabled: bool
) -> None:
    """The copy has the same state and settings, and goes its own way."""
    scaler = used(min_scale=2.0, max_consecutive_skips=9, growth_interval=5)
    if not enabled:
        scaler = amphal.GradScaler("cpu", enabled=False)
    other = how(scaler)
    assert type(other) is amphal.GradScaler
    assert other.state_dict() == scaler.state_dict()
    assert other.is_enabled() is enabled
    param, optimizer = problem()
    iterate(other, param, optimizer, math.inf)
    if enabled:
        assert (other.min_scale, other._max_consecutive_skips) == (2.0, 9)
        assert other.get_scale() == 16384.0
        assert scaler.get_scale() == 32768.0


def test_it_is_not_copied_in_the_middle_of_an_iteration() -> None:
    """The flags of a step belong to this process; the error names the missing call."""
    param, optimizer = problem()
    scaler = scaler_of()
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    for call in (copy.deepcopy, pickle.dumps):
        with pytest.raises(AssertionError, match=r"call scaler\.update\(\) first"):
            call(scaler)


def test_the_scaler_keeps_neither_model_nor_optimizer_alive() -> None:
    """Models are held weakly, and so are the optimizers whose outcome is known."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = scaler_of(model=model)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    refs: list[weakref.ref[Any]] = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


class _WithMore(torch.amp.GradScaler):
    """A vendor's scaler whose state has an entry that torch's lacks, as torch_npu's does."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "dynamic": True}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["dynamic"] is True
        super().load_state_dict(state_dict)


def saturating(kind: type[torch.amp.GradScaler]) -> Backend:
    """The CPU's backend, as one whose overflows only this vendor's scaler sees."""
    cpu = get_backend("cpu")
    blind = lambda hw: dataclasses.replace(cpu.scaler(hw), detects_overflow=False)  # noqa: E731
    return dataclasses.replace(cpu, scaler=blind, vendor_scaler=lambda: kind)


def test_a_vendors_scaler_takes_up_torchs_state() -> None:
    """On hardware that saturates, a checkpoint of torch's scaler loads, and so does its own."""
    with _registry.overridden(saturating(_WithMore)), warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        plan = amphal.detect("cpu", precision="fp16")
        scaler = amphal.GradScaler(plan)
        scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=512.0).state_dict())
        assert scaler.get_scale() == 512.0
        twin = amphal.GradScaler(plan)
        twin.load_state_dict(scaler.state_dict())
        assert twin.get_scale() == 512.0


class _Off(torch.amp.GradScaler):
    """A vendor's scaler that finds its device missing, says nothing and does nothing."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "enabled": False})


def test_a_vendors_scaler_that_switches_itself_off_is_an_error() -> None:
    """Nothing trains unscaled because a vendor's scaler thought that its device was missing."""
    with _registry.overridden(saturating(_Off)), warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        with pytest.raises(BackendError, match="_Off switched itself off on cpu"):
            amphal.GradScaler(amphal.detect("cpu", precision="fp16"))
