"""``amphal.precast_`` where a parameter is read out of sight, or the model changes afterwards."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.precast import LOW, assert_alike, assert_same, frozen, low_names, plan, run
from torch import nn
from torch.func import vmap
from torch.utils.checkpoint import checkpoint

import amphal
from amphal.errors import PrecastError

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Reader(nn.Module):
    """Scales by the weight of a linear that it doesn't own."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.others[0].weight.sum()


class Looks(nn.Linear):
    """Gives what is no tensor as well."""

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return out, {"eps": torch.finfo(self.weight.dtype).eps}


class OwnBackward(torch.autograd.Function):
    """Casts its weight forward, and reads it as it is backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grad.float() @ weight.float(), None


class Applies(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OwnBackward.apply(x, self.weight)


def input_gradient(model: nn.Module) -> torch.Tensor:
    x = X.clone().requires_grad_()
    run(model, x)[0].sum().backward()
    assert x.grad is not None
    return x.grad


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model.eval().requires_grad_(False)


def test_what_a_backward_of_inputs_reads_is_watched() -> None:
    """A frozen encoder behind something that trains: the gradient of its input is compared too."""
    model = frozen(Applies(8, 8, bias=False))
    precast = copy.deepcopy(model)
    report = amphal.precast_(precast, example_inputs=X, plan=plan())
    assert "mm reads it uncast" in report.left["weight"]
    assert_same([input_gradient(model)], [input_gradient(precast)])
    plain = frozen(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    report = amphal.precast_(plain, example_inputs=X, plan=plan())
    assert {"train, input grad", "eval, input grad"} < set(report.verified)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules(reentrant: bool) -> None:
    """Both kinds, the older of which takes no torch.autograd.grad."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.rest = nn.Linear(8, 8), frozen(nn.Sequential(nn.Linear(8, 8)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.rest, self.first(x), use_reentrant=reentrant)

    model, precast = Checkpointed(), Checkpointed()
    report = amphal.precast_(precast, example_inputs=X, plan=plan())
    assert report.cast == ("rest.0.weight", "rest.0.bias")
    assert precast.first.weight.grad is None
    for m in (model, precast):
        run(m, X)[0].sum().backward()
    grad = precast.first.weight.grad
    assert grad is not None
    assert_same([model.first.weight.grad], [grad])


def test_without_examples_all_of_the_model_has_to_be_torchs() -> None:
    """A module elsewhere in it, a hook of any kind, an activation may hold a reference."""
    linear = nn.Linear(8, 8)
    report = amphal.precast_(frozen(nn.Sequential(linear, Reader(linear))), plan=plan())
    assert not report.cast
    assert "Reader might read it" in report.left["0.weight"]
    hooked: Any = frozen(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    hooked[1].register_forward_hook(lambda module, args, out: out * hooked[0].weight.sum())
    assert "hook of ReLU" in amphal.precast_(hooked, plan=plan()).left["0.weight"]
    hooked = frozen(nn.Sequential(nn.Linear(8, 8)))
    hooked[0].register_full_backward_hook(
        lambda module, grads, _: (grads[0] * module.weight.sum(),)
    )
    assert "hook of Linear" in amphal.precast_(hooked, plan=plan()).left["0.weight"]
    replaced: Any = frozen(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    replaced[1].forward = lambda x: x * replaced[0].weight.sum()
    assert "forward of ReLU" in amphal.precast_(replaced, plan=plan()).left["0.weight"]
    odd: Any = frozen(nn.TransformerEncoderLayer(16, 2, 32, activation=lambda x: x.relu()))
    report = amphal.precast_(nn.TransformerEncoder(odd, 1), plan=plan())
    assert "activation function" in report.left["layers.0.linear1.weight"]
    loose = amphal.precast_(frozen(nn.ModuleList([nn.Linear(8, 8)])), plan=plan())
    assert "what calls the modules of this ModuleList" in loose.left["0.weight"]


def test_a_view_that_a_module_keeps_is_a_reason_to_stay() -> None:
    """A checkpoint loaded later would not reach it; also one that the first forward makes."""

    class Views(nn.Module):
        def __init__(self, early: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)
            self.kept: dict[str, torch.Tensor] = {}
            if early:
                self.kept["t"] = self.linear.weight.detach().t()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.kept:
                self.kept["t"] = self.linear.weight.detach().t()
            return x @ self.kept["t"]

    for early in (False, True):
        model = frozen(Views(early))
        report = amphal.precast_(model, example_inputs=X, plan=plan())
        assert "attribute" in report.left["linear.weight"]
        model.load_state_dict({"linear.weight": torch.eye(8)})
        assert_same(run(model, X), [X.to(LOW)])


def test_a_mode_that_does_not_run_is_left_out() -> None:
    """Also the one that the model is in; only where none runs its error is raised."""
    model: Any = frozen(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))).train()
    report = amphal.precast_(model, example_inputs=X[:1], plan=plan())
    assert report.cast == ("0.weight", "0.bias")
    assert set(report.verified) == {"eval, grad", "eval, no grad", "eval, input grad"}
    with pytest.raises(RuntimeError, match="shapes"):
        amphal.precast_(
            frozen(nn.Sequential(nn.Linear(8, 8))), example_inputs=X[:, :3], plan=plan()
        )


def test_what_is_computed_once_is_watched() -> None:
    """A model that keeps a value which the first forward reads from the weight uncast."""

    class Caches(nn.Linear):
        norm: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.norm is None:
                self.norm = self.weight.norm()
            return super().forward(x) * self.norm

    report = amphal.precast_(frozen(Caches(8, 8)), example_inputs=X, plan=plan())
    assert "linalg_vector_norm" in report.left["weight"]
    assert report.cast == ("bias",)


def test_outputs_that_are_no_tensors_are_compared() -> None:
    """Numbers, strings and numpy's: here the dtype shows in one."""
    report = amphal.precast_(frozen(Looks(8, 8)), example_inputs=X, plan=plan())
    assert report.left == {"weight": "the outputs change when it is stored low"}
    assert report.cast == ("bias",)


def test_an_interrupt_puts_all_back() -> None:
    """At whichever run of the trial it comes, or the error of a forward: every bit and no hook."""

    class Stops(nn.Module):
        def __init__(self, last: int) -> None:
            super().__init__()
            self.layers, self.left = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), last

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            for layer in self.layers:
                x = layer(x)
            return x + torch.finfo(self.layers[3].get_parameter("weight").dtype).eps

    interrupted = 0
    for last in range(1000):
        model: Any = frozen(Stops(last))
        before = copy.deepcopy(model.state_dict())
        try:
            report = amphal.precast_(model, example_inputs=X, plan=plan())
        except KeyboardInterrupt:
            interrupted += 1
            assert_same([*model.state_dict().values()], [*before.values()])
            assert not model._forward_pre_hooks
            assert not model.layers[0]._load_state_dict_pre_hooks
        else:
            break
    assert interrupted > 20
    assert set(report.left) == {"layers.3.weight"}


def _hook(layer: Any) -> None:
    layer.linear1.register_forward_hook(lambda *args: None)


def _train_around_attention(layer: nn.Module) -> None:
    layer.training = True


def _unfreeze_norm(layer: Any) -> None:
    layer.norm1.weight.requires_grad_()


@pytest.mark.parametrize("change", [_hook, _train_around_attention, _unfreeze_norm])
@pytest.mark.parametrize("through", [lambda m: m, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_layer_taken_off_its_fused_kernel_is_refused(
    change: Callable[[nn.Module], None], through: Callable[[Any], Any]
) -> None:
    """Its attention would choose the other of two kernels; precast as it is then, it runs."""
    x = torch.randn(2, 5, 16)
    precast, model = encoder(), encoder()
    amphal.precast_(precast, plan=plan(), keep_originals=True)
    precast = through(precast)
    assert_same(run(precast, x), run(model, x))
    change(precast.layers[1])
    change(model.layers[1])
    with pytest.raises(PrecastError, match="fused kernel"):
        run(precast, x)
    amphal.undo_precast_(precast)
    amphal.precast_(precast, example_inputs=x, plan=plan())
    assert "layers.0.self_attn.in_proj_weight" in low_names(precast)
    assert "layers.1.self_attn.in_proj_weight" not in low_names(precast)
    assert_same(run(precast, x), run(model, x))


def test_a_policy_around_a_model_with_its_own_region_is_checked() -> None:
    """Regions inside keep the policy of the one around them."""

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=LOW):
                return super().forward(x)

    model = frozen(Own(8, 8))
    precast = copy.deepcopy(model)
    amphal.precast_(precast, example_inputs=X, plan=plan())
    assert_same([precast(X)], [model(X)])
    with pytest.raises(PrecastError, match="casting policy"):
        run(precast, X, region=amphal.autocast(plan(), ops={"linear": "fp32"}))


def test_vmap_around_the_model() -> None:
    """There a linear's bias is not cast: refused, unless the example runs it so."""
    model: Any = frozen(nn.Sequential(nn.Linear(8, 8)))
    precast = copy.deepcopy(model)
    amphal.precast_(precast, plan=plan())
    with plan().autocast(), pytest.raises(PrecastError, match="vmap"):
        vmap(precast)(X)
    precast = copy.deepcopy(model)
    report = amphal.precast_(precast, example_inputs=lambda m: vmap(m)(X), plan=plan())
    assert report.cast == ("0.weight",)
    with plan().autocast():
        assert_same([vmap(precast)(X)], [vmap(model)(X)])
    assert_alike(model, precast, X)


def test_the_way_back_after_a_parametrization() -> None:
    """An error that says what to do, and then every bit."""
    model: Any = frozen(nn.Sequential(nn.Linear(8, 8)))
    want = copy.deepcopy(model.state_dict())
    amphal.precast_(model, plan=plan(), keep_originals=True)
    bias, model[0].bias = model[0].bias, None
    for call in (amphal.undo_precast_, amphal.full_precision_state_dict):
        with pytest.raises(PrecastError, match=r"0\.bias .* no parameter of its module"):
            call(model)
    model[0].bias = bias
    amphal.undo_precast_(model)
    assert_same([*model.state_dict().values()], [*want.values()])


def test_a_part_of_a_precast_model() -> None:
    """Not restored alone; saved in full precision; a copy of it holds nothing of the rest."""
    model: Any = frozen(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
    alone, want = len(pickle.dumps(model[0])), copy.deepcopy(model[0].state_dict())
    amphal.precast_(model, plan=plan())
    assert len(pickle.dumps(model[0])) < alone
    with pytest.raises(PrecastError, match="with another model"):
        amphal.undo_precast_(model[0])
    amphal.undo_precast_(model, rounded=True)
    model[0].load_state_dict(want)
    amphal.precast_(model, plan=plan(), keep_originals=True)
    assert_same([*amphal.full_precision_state_dict(model[0]).values()], [*want.values()])
    amphal.undo_precast_(model)
    assert amphal.undo_precast_(model[0]) == ()


@torch.jit.script
def _scripted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w.to(x.dtype)


CONVERSIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "as_tensor": lambda x, w: x * torch.as_tensor(w, dtype=x.dtype),
    "new_tensor": lambda x, w: x * x.new_tensor(w),
    "softmax": lambda x, w: x * w.softmax(-1, dtype=x.dtype),
    "overload": lambda x, w: x * torch.ops.aten.to.dtype(w, x.dtype),
    "script": lambda x, w: x * _scripted(x, w),
}


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
def test_conversions_of_every_kind_are_the_models_own(name: str) -> None:
    """To the dtype of the input: low in the example, and float32 afterwards."""

    class Converts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return CONVERSIONS[name](x, self.weight)

    model = frozen(Converts())
    precast = copy.deepcopy(model)
    report = amphal.precast_(precast, example_inputs=X.to(LOW), plan=plan())
    assert "itself" in report.left["weight"]
    assert_same(run(precast, X), run(model, X))
