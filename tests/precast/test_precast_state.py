"""A precast model: the way back, state dicts, copies, compiled code, and what it refuses."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.precast import FULL, LOW, assert_same, frozen, low_names, plan, run
from torch import nn

import amphal
from amphal.errors import ArgumentTypeError, PrecastError, StateDictError

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A frozen base, of which one linear has two names, and a head that trains."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        first = nn.Linear(8, 8)
        # Any: torch types an attribute of a module as Tensor | Module.
        self.base: Any = nn.Sequential(first, nn.LayerNorm(8), nn.Linear(8, 8))
        self.again = nn.Linear(8, 8)
        self.again.weight = first.weight
        self.head = nn.Linear(8, 2)
        frozen(self.base)
        frozen(self.again)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.base(x)))


CAST = {"base.0.weight", "base.0.bias", "base.2.weight", "base.2.bias", "again.bias"}


def precast(keep: bool = False, seed: int = 0) -> Net:
    model = Net(seed)
    report = amphal.precast_(model, example_inputs=X, plan=plan(), keep_originals=keep)
    assert set(report.cast) == CAST
    assert report.bytes_kept == (2 * report.bytes_saved if keep else 0)
    return model


def assert_restored(model: nn.Module, want: nn.Module) -> None:
    assert not low_names(model)
    assert_same(list(model.state_dict().values()), list(want.state_dict().values()))
    assert_same([model(X)], [want(X)])  # no region is needed


def test_parameters_stay_the_same_objects() -> None:
    """Tied names, an optimizer and DistributedDataParallel see what they saw."""
    model = Net()
    before = dict(model.named_parameters(remove_duplicate=False))
    amphal.precast_(model, example_inputs=X, plan=plan())
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[n] is p for n, p in before.items())
    assert model.again.weight is model.base[0].weight
    assert low_names(model) == CAST


def test_kept_originals_come_back_exactly() -> None:
    """Every bit, under every name, and the model is as if never touched."""
    model = precast(keep=True)
    assert set(amphal.undo_precast_(model)) == CAST
    assert_restored(model, Net())
    assert model.again.weight is model.base[0].weight
    assert amphal.undo_precast_(model) == ()
    assert not model._forward_pre_hooks
    assert not model.base[0]._load_state_dict_pre_hooks
    assert "_amphal_precast" not in vars(model)


def test_originals_from_a_state_dict_come_back_exactly() -> None:
    """Those of another model are refused, and nothing changes."""
    model = precast()
    with pytest.raises(StateDictError, match="not kept"):
        amphal.undo_precast_(model)
    with pytest.raises(StateDictError, match="not in the state dict"):
        amphal.undo_precast_(model, state_dict={"head.weight": X})
    with pytest.raises(StateDictError, match=r"not the bf16 of these originals"):
        amphal.undo_precast_(model, state_dict=Net(1).state_dict())
    assert low_names(model) == CAST
    amphal.undo_precast_(model, state_dict=Net().state_dict())
    assert_restored(model, Net())


def test_rounded_values_are_given_only_on_demand() -> None:
    """Without rounded=True the undo raises and changes nothing; with it, they are the stored
    values in float32."""
    model = precast()
    with pytest.raises(StateDictError, match="not kept"):
        amphal.undo_precast_(model)
    assert low_names(model) == CAST
    stored = {n: p.detach().float() for n, p in model.named_parameters() if n in CAST}
    amphal.undo_precast_(model, rounded=True)
    assert_same([dict(model.named_parameters())[n].detach() for n in stored], [*stored.values()])


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_checkpoint_of_full_precision_loads(assign: bool, keep: bool) -> None:
    """strict, into what is stored low; kept originals follow, also through a submodule."""
    other = Net(1)
    model = precast(keep=keep)
    model.load_state_dict(other.state_dict(), assign=assign)
    assert low_names(model) >= CAST
    assert model.head.weight.dtype is FULL
    assert_same(run(model, X), run(other, X))
    third = Net(2)
    model.base.load_state_dict(third.base.state_dict(), assign=assign)
    model.again.load_state_dict(third.again.state_dict(), assign=assign)
    model.head.load_state_dict(third.head.state_dict(), assign=assign)
    assert_same(run(model, X), run(third, X))
    amphal.undo_precast_(model, state_dict=None if keep else third.state_dict())
    assert_restored(model, third)


def test_a_failed_load_leaves_the_originals() -> None:
    """A checkpoint of another shape is refused by torch, and undo_precast_ still works."""
    model = precast(keep=True)
    wrong = Net().state_dict() | {"base.2.weight": torch.zeros(3, 3)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(wrong)
    amphal.undo_precast_(model)
    assert_restored(model, Net())


def test_values_changed_past_the_checks_are_not_passed_off_as_originals() -> None:
    """A write into the stored values is noticed when they are to be restored."""
    model = precast(keep=True)
    with torch.no_grad():
        model.base[2].weight.add_(1)
    with pytest.raises(StateDictError, match="changed since"):
        amphal.undo_precast_(model)
    amphal.undo_precast_(model, rounded=True)
    assert model.base[0].weight.equal(Net().base[0].weight)
    assert model.base[2].weight.equal((Net().base[2].weight.to(LOW) + 1).float())


@pytest.mark.parametrize("keep", [False, True])
def test_saving_gives_the_low_precision_or_the_full(keep: bool) -> None:
    """state_dict() holds what is stored; full_precision_state_dict() the original dtype."""
    model, want = precast(keep), Net().state_dict()
    low = model.state_dict()
    assert low["base.0.weight"].dtype is low["again.weight"].dtype is LOW
    full = amphal.full_precision_state_dict(model)
    assert list(full) == list(want)
    if not keep:
        names = {*CAST, "again.weight"}
        want = {n: v.to(LOW).float() if n in names else v for n, v in want.items()}
    assert_same([*full.values()], [*want.values()])
    fresh = Net(3)
    fresh.load_state_dict(full)
    assert_same(run(fresh, X), run(model, X))
    fresh = precast(keep, seed=3)
    fresh.load_state_dict(low)
    assert_same(run(fresh, X), run(model, X))
    amphal.undo_precast_(fresh, rounded=not keep)
    assert_same([fresh.base[0].weight.detach()], [low["base.0.weight"].float()])


def _saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "through", [copy.deepcopy, _saved, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_are_precast_models_of_their_own(through: Callable[[Any], Any]) -> None:
    """They check, load and restore by themselves; the model that they are of stays as it is."""
    model = precast(keep=True)
    other = through(model)
    assert_same(run(other, X), run(model, X))
    with pytest.raises(PrecastError, match="no autocast region"):
        other(X)
    other.load_state_dict(Net(1).state_dict())
    amphal.undo_precast_(other)
    assert_restored(other, Net(1))
    assert low_names(model) == CAST
    amphal.undo_precast_(model)
    assert_restored(model, Net())


def test_running_it_where_outputs_would_differ_is_refused() -> None:
    """Without a region, in one of another dtype, in one that is off; in its own it runs."""
    model = precast()
    with pytest.raises(PrecastError, match="runs in no autocast region of 'cpu'"):
        model(X)
    other = torch.autocast("cpu", dtype=torch.float16)
    with pytest.raises(PrecastError, match="runs in a region of fp16 of 'cpu'"):
        run(model, X, region=other)
    with pytest.raises(PrecastError, match="no autocast region"):
        run(model, X, region=amphal.autocast("cpu", enabled=False))
    assert_same(run(model, X), run(Net(), X))
    assert_same(run(model, X, region=torch.autocast("cpu", dtype=LOW)), run(Net(), X))


def test_a_model_with_regions_of_its_own_needs_none_around_it() -> None:
    """What it enters itself is what counts."""

    class Own(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=LOW):
                return super().forward(x)

    model = Own()
    assert set(amphal.precast_(model, example_inputs=X, plan=plan()).cast) == CAST
    assert_same([model(X)], [Own()(X)])
    assert_same(run(model, X), [Own()(X)])


def test_changes_to_what_is_stored_are_noticed() -> None:
    """Unfreezing, converting and parametrizing each raise at the next forward."""
    model = precast()
    model.base[2].weight.requires_grad_(True)
    with pytest.raises(PrecastError, match=r"base\.2\.weight .* requires a gradient"):
        run(model, X)
    model = precast().float()
    with pytest.raises(PrecastError, match=r"is torch\.float32"):
        run(model, X)
    model = precast()
    nn.utils.parametrizations.spectral_norm(model.base[2])
    with pytest.raises(PrecastError, match="no parameter of its module"):
        run(model, X)
    model = precast().to("meta")
    with pytest.raises(PrecastError, match="on meta now"):
        run(model, X.to("meta"))


def test_a_module_of_a_model_can_be_precast_alone() -> None:
    """undo_precast_ and full_precision_state_dict of the model find it."""
    model = Net()
    amphal.precast_(model.base, plan=plan(), keep_originals=True)
    assert low_names(model) == {n for n in CAST if n.startswith("base")}
    assert_same(run(model, X), run(Net(), X))
    full = amphal.full_precision_state_dict(model)
    assert_same([*full.values()], [*Net().state_dict().values()])
    assert "base.2.weight" in amphal.undo_precast_(model)
    assert_restored(model, Net())
    model = Net()
    amphal.precast_(model.base, plan=plan())
    amphal.undo_precast_(model, state_dict=Net().state_dict())
    assert_restored(model, Net())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(backend: str) -> None:
    """fullgraph=True: the same bits, and the region is checked there too."""
    torch._dynamo.reset()
    model = precast()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    plain = torch.compile(Net(), fullgraph=True, backend=backend)
    assert_same(run(compiled, X), run(plain, X))
    with pytest.raises(Exception, match=r"Observed exception|no autocast region"):
        compiled(X)
    assert_same(run(compiled, X), run(plain, X))


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    """The region in a module around it: the program gives the same bits without amphal's checks."""

    class Around(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with amphal.autocast("cpu", dtype="bf16"):
                return self.model(x)

    program = torch.export.export(Around(precast()), (X,), strict=strict).module()
    assert_same([program(X)], run(Net(), X))


def test_restoring_inside_a_region_uses_the_restored_values() -> None:
    """No cast of the stored values is left in the region's cache."""
    model = precast(keep=True)
    with plan().autocast():
        before = model(X)
        amphal.undo_precast_(model)
        with torch.no_grad():
            model.base[2].weight.zero_()
        assert not torch.equal(model(X), before)


def test_in_inference_mode_as_elsewhere() -> None:
    """What is stored and restored there can take part in training afterwards."""
    model = Net()
    with torch.inference_mode():
        amphal.precast_(model, example_inputs=X, plan=plan(), keep_originals=True)
        assert_same(run(model, X), run(Net(), X))
    assert not any(p.is_inference() for p in model.parameters())
    run(model, X)[0].sum().backward()
    with torch.inference_mode():
        amphal.undo_precast_(model)
    assert not any(p.is_inference() for p in model.parameters())
    assert_restored(model, Net())


def test_a_gradient_of_the_stored_precision_is_in_the_way() -> None:
    """Of a parameter that was unfrozen and trained past the check."""
    model = precast(keep=True)
    model.base[2].weight.requires_grad_(True)
    model.base[2](X.to(LOW)).sum().backward()
    with pytest.raises(PrecastError, match=r"base\.2\.weight has a gradient"):
        amphal.undo_precast_(model)
    model.base[2].weight.grad = None
    amphal.undo_precast_(model)
    assert model.base[2].weight.dtype is FULL


def test_wrong_types_are_refused() -> None:
    """With what is wanted."""
    with pytest.raises(ArgumentTypeError, match=r"nn\.Module"):
        amphal.undo_precast_(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="mapping"):
        amphal.undo_precast_(Net(), state_dict=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"nn\.Module"):
        amphal.full_precision_state_dict(3)  # type: ignore[arg-type]


def test_importing_amphal_leaves_it_out(tmp_path: Any) -> None:
    """It is imported at its first use."""
    code = (
        "import sys, amphal; assert not [m for m in sys.modules if 'precast' in m];"
        "amphal.precast_; assert 'amphal._precast.precast' in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    assert result.returncode == 0, result.stderr


def test_it_runs_in_every_mode_after_a_round_trip() -> None:
    """Restored and precast again, in training and eval mode."""
    model = precast(keep=True)
    amphal.undo_precast_(model)
    amphal.precast_(model, example_inputs=X, plan=plan())
    for training, grad in itertools.product((False, True), repeat=2):
        with torch.set_grad_enabled(grad):
            assert_same(run(model.train(training), X), run(Net().train(training), X))
