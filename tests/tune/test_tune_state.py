"""What a step can reach, and that all of it is put back bit by bit."""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import random
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import amphal
from amphal._tune import tuning as _tune
from amphal._tune.reach import reachable, reachable_state
from amphal._tune.snapshot import Snapshot
from amphal.errors import ArgumentError, TuneError

CPU = torch.device("cpu")


class Training:
    """A model with dropout and running statistics, and all that changes with a step of it."""

    def __init__(self, optimizer: str = "AdamW", **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        )
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.1, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.scaler = amphal.GradScaler("cpu", enabled=True, growth_interval=2)
        self.x = torch.randn(16, 4)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean() + random.random() + np.random.rand()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return float(loss.detach())

    def state(self) -> list[Any]:
        """All of it, for comparing bit by bit."""
        modules = [(name, m.training) for name, m in self.model.named_modules()]
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return [
            {k: v.clone() for k, v in self.model.state_dict().items()},
            modules,
            grads,
            len(self.optimizer.state),
            self.optimizer.state_dict(),
            self.scheduler.state_dict(),
            self.scaler.state_dict(),
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(),
        ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("AdamW", {}), ("AdamW", {"fused": True}), ("SGD", {"momentum": 0.9}), ("Adagrad", {})],
)
@pytest.mark.parametrize("warm", [0, 2])
def test_everything_is_put_back(optimizer: str, options: dict[str, Any], warm: int) -> None:
    """Fresh or in the middle of training: state is equal afterwards, and so are the next losses."""
    work = Training(optimizer, **options)
    for _ in range(warm):
        work.step()
    before = copy.deepcopy(work.state())
    snapshot = Snapshot(reachable_state(work.step), CPU)
    first = [work.step() for _ in range(4)]
    work.model.eval()
    snapshot.restore()
    assert same(work.state(), before)
    assert [work.step() for _ in range(4)] == first
    snapshot.restore()
    assert same(work.state(), before)


def test_lbfgs_is_put_back() -> None:
    """An optimizer whose state holds lists of tensors, and calls a closure."""
    parameter = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = torch.optim.LBFGS([parameter], lr=0.1)

    def step() -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = parameter.square().sum()
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach())

    step()
    snapshot = Snapshot(reachable_state(step), CPU)
    first = [step() for _ in range(3)]
    snapshot.restore()
    assert [step() for _ in range(3)] == first


def test_a_module_that_was_cast_or_moved_is_the_old_one_again() -> None:
    """Also what replaces parameters, buffers and plain attributes is undone, in place."""
    model = nn.BatchNorm1d(2)
    model.calls = 1
    weight, pointer = model.weight, model.weight.data_ptr()
    snapshot = Snapshot([model], CPU)
    model.to(torch.bfloat16)
    model.weight = nn.Parameter(torch.zeros(5))
    model.register_buffer("extra", torch.ones(1))
    model.calls, model.cached = 2, object()
    model.requires_grad_(False)
    snapshot.restore()
    assert model.weight is weight
    assert (weight.data_ptr(), weight.dtype, weight.requires_grad) == (pointer, torch.float32, True)
    assert "extra" not in dict(model.named_buffers())
    assert model.running_mean is not None
    assert model.running_mean.dtype is torch.float32
    assert model.calls == 1
    assert not hasattr(model, "cached")


def test_gradients_are_put_back() -> None:
    """A gradient that was there has its values again; one that was not is gone."""
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    a.grad = torch.full((2,), 3.0)
    kept = a.grad
    snapshot = Snapshot([a, b], CPU)
    (a * b).sum().backward()
    assert snapshot.gradients_changed()
    snapshot.restore()
    assert a.grad is kept
    assert kept.tolist() == [3.0, 3.0]
    assert b.grad is None


def test_a_state_of_ones_own_is_asked_for() -> None:
    """Whatever has state_dict and load_state_dict, such as a loader that can resume."""

    class Loader:
        def __init__(self) -> None:
            self.place = [0]

        def state_dict(self) -> dict[str, Any]:
            return {"place": self.place}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.place = state["place"]

    loader = Loader()
    snapshot = Snapshot([loader], CPU)
    for _ in range(2):
        loader.place.append(1)
        snapshot.restore()
        assert loader.place == [0]


def test_generators_of_ones_own_are_put_back() -> None:
    """torch's, Python's and numpy's."""
    ours = torch.Generator().manual_seed(1)
    plain, numpys = random.Random(1), np.random.default_rng(1)

    def step() -> list[float]:
        return [float(torch.rand(1, generator=ours)), plain.random(), float(numpys.random())]

    snapshot = Snapshot(reachable_state(step), CPU)
    first = step()
    snapshot.restore()
    assert step() == first


def test_tensors_that_cannot_be_written_to_are_left_alone() -> None:
    """Expanded and inference tensors among the inputs of a step are no error."""
    expanded = torch.ones(1).expand(4)
    with torch.inference_mode():
        inference = torch.ones(2)
    snapshot = Snapshot([expanded, inference, torch.ones(2, device="meta")], CPU)
    with torch.inference_mode():
        inference.zero_()
    snapshot.restore()
    assert inference.tolist() == [1.0, 1.0]


def test_a_lazy_module_has_to_be_called_first() -> None:
    """Its initialisation could not be undone."""
    with pytest.raises(ArgumentError, match="call the model once before"):
        Snapshot([nn.LazyLinear(3)], CPU)


def test_an_interrupt_while_restoring_still_restores() -> None:
    """The interrupt goes on once the state is back."""

    class Stubborn:
        loads = 0

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loads += 1
            if self.loads == 1:
                raise KeyboardInterrupt

    tensor = torch.ones(2)
    snapshot = Snapshot([Stubborn(), tensor], CPU)
    tensor.zero_()
    with pytest.raises(KeyboardInterrupt):
        snapshot.restore()
    assert tensor.tolist() == [1.0, 1.0]


# What is found.

GLOBAL_MODEL = nn.Linear(2, 2)
GLOBAL_UNUSED = nn.Linear(2, 2)
LIBRARY = ModuleType("users_library")
LIBRARY.model, LIBRARY.other = nn.Linear(1, 1), nn.Linear(1, 1)  # type: ignore[attr-defined]


def by_global(plan: Any) -> Any:
    return GLOBAL_MODEL(plan)


def by_module(plan: Any) -> Any:
    return LIBRARY.model(plan)


def by_helper(plan: Any) -> Any:
    return [by_global(x) for x in plan]


class Holder:
    """A plain object, as a trainer is."""

    def __init__(self) -> None:
        self.parts = {"models": [nn.Linear(3, 3)]}

    def step(self, plan: Any) -> Any:
        return self.parts

    def __call__(self, plan: Any) -> Any:
        return by_global(plan)


def found(step: Callable[..., Any]) -> list[object]:
    return reachable_state(step)


def test_globals_that_the_code_names_are_found() -> None:
    """Directly, in a helper, and in a module of the user's; what is not named is not."""
    assert found(by_global) == [GLOBAL_MODEL]
    assert found(by_helper) == [GLOBAL_MODEL]
    assert found(by_module) == [LIBRARY.model]


def test_self_is_searched() -> None:
    """A bound method's self, its plain attributes, and what its methods name."""
    holder = Holder()
    assert holder.parts["models"][0] in found(holder.step)
    assert set(map(id, found(holder))) == {id(holder.parts["models"][0]), id(GLOBAL_MODEL)}


def test_closures_partials_and_defaults_are_searched() -> None:
    """Also through a decorator and a lambda."""
    a, b, c = nn.Linear(1, 1), nn.Linear(2, 2), nn.Linear(3, 3)

    @amphal.autocast("cpu", dtype="bf16")
    def inner(x: Any, model: nn.Module = b) -> Any:
        return a(x)

    step = functools.partial(lambda model, plan: inner(plan), c)
    assert {id(one) for one in found(step)} == {id(a), id(b), id(c)}


def test_long_containers_are_data() -> None:
    """A list of a million samples is not copied."""
    data = [torch.ones(1)] * 1001
    assert found(lambda plan: data[0]) == []


class Settings:
    """A class that is used as a namespace."""

    model = nn.Linear(4, 4)


class Trainer:
    """An object whose own state is not all that it changes."""

    def __init__(self) -> None:
        self.model, self.epoch = nn.Linear(5, 5), 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class Indirect:
    """What it reaches, it reaches by methods of other kinds."""

    @staticmethod
    def by_static(plan: Any) -> Any:
        return GLOBAL_MODEL(plan)

    @property
    def library(self) -> Any:
        return LIBRARY.model

    def step(self, plan: Any) -> Any:
        return self.by_static(self.library(plan))


class Slotted:
    """No ``__dict__``."""

    __slots__ = ("model",)


def test_namespaces_are_searched() -> None:
    """Classes, SimpleNamespace and argparse's: notebooks keep their models there."""
    space, options = SimpleNamespace(model=nn.Linear(1, 1)), argparse.Namespace(model=GLOBAL_MODEL)
    slotted = Slotted()
    slotted.model = nn.Linear(1, 2)
    assert found(lambda plan: Settings.model(plan)) == [Settings.model]
    assert found(lambda plan: space.model(plan)) == [space.model]
    assert found(lambda plan: options.model(plan)) == [GLOBAL_MODEL]
    assert found(lambda plan: slotted.model(plan)) == [slotted.model]


def test_all_kinds_of_methods_are_searched() -> None:
    """Static methods, properties, and a cached function."""
    assert {id(one) for one in found(Indirect().step)} == {id(GLOBAL_MODEL), id(LIBRARY.model)}
    cached = functools.lru_cache(by_global)
    assert found(lambda plan: cached(plan)) == [GLOBAL_MODEL]


def test_a_state_of_ones_own_need_not_be_all() -> None:
    """An object whose state_dict() has only an epoch is searched for its model too."""
    trainer = Trainer()
    assert found(lambda plan: trainer.model(plan)) == [trainer, trainer.model]


def test_a_loaders_generator_is_found() -> None:
    """It shuffles by it; its data are not copied."""
    generator = torch.Generator()
    data = TensorDataset(torch.ones(4, 1))
    loader = DataLoader(data, shuffle=True, generator=generator)
    assert found(lambda plan: next(iter(loader))) == [generator]


def test_a_proxy_is_not_asked() -> None:
    """An object that answers every attribute, or none, is no state."""

    class Proxy:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("nothing to stand for")

    proxy = Proxy()
    assert found(lambda plan: proxy) == []


class Cache:
    """Keys and values, as inference keeps them."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.length = 0

    def add(self, key: torch.Tensor) -> torch.Tensor:
        self.keys = key if self.keys is None else torch.cat([self.keys, key])
        self.length += 1
        return self.keys


@pytest.mark.parametrize("in_module", [False, True])
def test_what_groups_tensors_is_put_back(in_module: bool) -> None:
    """A cache that grows, an average that is replaced, tensors that are appended; no counters."""
    cache, average, kept, calls = Cache(), {"w": torch.zeros(2)}, [], [0]
    model = nn.Linear(2, 2)
    if in_module:
        model.cache = cache
    old = average["w"]

    def step() -> torch.Tensor:
        calls[0] += 1
        average["w"] = average["w"] * 0.9 + 0.1
        kept.append(torch.ones(2))
        return (model.cache if in_module else cache).add(torch.ones(1, 2))  # type: ignore[operator,union-attr]

    snapshot = Snapshot(reachable(step)[0], CPU, reachable(step)[1])
    for _ in range(3):
        step()
        snapshot.restore()
    assert (cache.keys, cache.length, kept, calls) == (None, 0, [], [3])
    assert average["w"] is old
    assert old.tolist() == [0.0, 0.0]


def test_the_copy_is_gone_afterwards() -> None:
    """Also where the error that was raised, and with it the frames, is kept."""
    model = nn.Linear(2, 2)
    copies = []

    def step(plan: Any) -> Any:
        raise RuntimeError("no memory")

    class Kept(Snapshot):
        def __init__(self, *given: Any) -> None:
            super().__init__([model], *given[1:])
            copies.append(weakref.ref(self._undo[0]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tune, "Snapshot", Kept)
        with pytest.raises(TuneError) as kept:
            amphal.tune(step, device="cpu", candidates=["fp32"])
    gc.collect()
    assert kept.value.__traceback__ is not None
    assert [copy() for copy in copies] == [None]
