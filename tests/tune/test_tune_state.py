"""What a step holds, and that all of it is put back bit by bit."""

from __future__ import annotations

import copy
import functools
import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amphal
from amphal._tune import tuning as _tune
from amphal._tune.held import held_by
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
    snapshot = Snapshot(held_by(work.step), CPU)
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
    snapshot = Snapshot(held_by(step), CPU)
    first = [step() for _ in range(3)]
    snapshot.restore()
    assert [step() for _ in range(3)] == first


def test_a_module_that_was_cast_or_moved_is_the_old_one_again() -> None:
    """Also what replaces parameters, buffers and plain attributes is undone, in place."""
    model: Any = nn.BatchNorm1d(2)
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

    snapshot = Snapshot([ours, plain, numpys], CPU)
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


# What is found without state=.

GLOBAL_MODEL = nn.Linear(2, 2)


class Holder:
    """A plain object, as a trainer is."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters())
        self.epoch = 0

    def step(self, plan: Any) -> Any:
        return self.model(plan)

    def __call__(self, plan: Any) -> Any:
        return self.model(plan)


class Trainer(Holder):
    """An object with a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


def test_self_is_searched() -> None:
    """A bound method's self and its attributes; an object that is called likewise."""
    holder, trainer = Holder(), Trainer()
    assert held_by(holder.step) == held_by(holder) == [holder.model, holder.optimizer]
    assert held_by(trainer.step) == [trainer, trainer.model, trainer.optimizer]


def test_closures_partials_and_defaults_are_searched() -> None:
    """Also below a decorator."""
    a, b, c = nn.Linear(1, 1), nn.Linear(2, 2), nn.Linear(3, 3)

    @amphal.autocast("cpu", dtype="bf16")
    def inner(model: Any, plan: Any, other: nn.Module = b) -> Any:
        return a(plan)

    step = functools.partial(inner, c)
    assert {id(one) for one in held_by(step)} == {id(a), id(b), id(c)}


def by_global(plan: Any) -> Any:
    return GLOBAL_MODEL(plan)


def test_where_no_module_is_held_state_has_to_be_passed() -> None:
    """Globals, and containers in a closure, are not searched; the error says what to pass."""
    models, x = [nn.Linear(1, 1)], torch.ones(1)
    for step in (by_global, lambda plan: models[0](x)):
        with pytest.raises(ArgumentError, match=r"state=\[model, optimizer, ...\]; state=\[\] if"):
            amphal.tune(step, device="cpu")


def test_an_optimizer_of_a_module_that_is_not_held_is_an_error() -> None:
    """The buffers of that module would stay as the steps left them."""
    model, optimizer = nn.Linear(1, 1), torch.optim.SGD(GLOBAL_MODEL.parameters())

    def step(plan: Any) -> None:
        model(plan)
        optimizer.step()

    with pytest.raises(ArgumentError, match=r"an optimizer \(SGD\) of parameters whose module"):
        held_by(step)


class Cache:
    """Keys and values, as inference keeps them."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.length = 0

    def add(self, key: torch.Tensor) -> torch.Tensor:
        self.keys = key if self.keys is None else torch.cat([self.keys, key])
        self.length += 1
        return self.keys


def test_containers_that_state_names_are_put_back() -> None:
    """A cache that grows, an average that is replaced, tensors that are appended, a counter."""
    cache, average, kept, calls = Cache(), {"w": torch.zeros(2)}, [], [0]
    old = average["w"]

    def step() -> torch.Tensor:
        calls[0] += 1
        average["w"] = average["w"].mul_(0.9) + 0.1
        kept.append(torch.ones(2))
        return cache.add(torch.ones(1, 2))

    snapshot = Snapshot([vars(cache), average, kept, calls], CPU)
    for _ in range(3):
        step()
        snapshot.restore()
    assert (cache.keys, cache.length, kept, calls) == (None, 0, [], [0])
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
            amphal.tune(step, device="cpu", candidates=["fp32"], state=())
    gc.collect()
    assert kept.value.__traceback__ is not None
    assert [copy() for copy in copies] == [None]
