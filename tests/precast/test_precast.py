"""``amphal.precast_``: which parameters are stored low, and that nothing else changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.precast import (
    FULL,
    LOW,
    assert_alike,
    assert_same,
    frozen,
    low_names,
    plan,
    run,
)
from torch import nn
from torch.nn.utils import parametrizations

import amphal
from amphal.errors import ArgumentError, ArgumentTypeError, PrecastError

from _architectures import TORCH_ONLY, Block  # isort: skip - precast_help makes it found

pytestmark = pytest.mark.filterwarnings("ignore:.*(nested|fastpath|weight_norm).*")
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """A language model of one layer, its output layer tied to its embedding."""

    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embed, self.mid = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.embed(ids)))


class Twice(nn.Module):
    """A shared linear, one whose weight a norm reads too, and a bare parameter read as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.both, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.w, self.part = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(8, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.both(self.shared(self.shared(x))) + self.both.weight.norm()
        y = nn.functional.layer_norm(x, (8,), self.scale.to(x.dtype))
        return y @ self.w.t() + (y @ self.part[:, :4])


@pytest.mark.parametrize("name", TORCH_ONLY)
def test_architectures_of_torch_stay_bit_identical(name: str) -> None:
    """Outputs on inputs not seen before, in every mode, and half the bytes of what is cast."""
    make, inputs = TORCH_ONLY[name]
    torch.manual_seed(0)
    model = frozen(make().eval())
    precast = copy.deepcopy(model)
    report = amphal.precast_(precast, example_inputs=inputs(), plan=plan())
    assert_alike(model, precast, inputs())
    assert set(report.cast) == low_names(precast)
    cast = sum(dict(model.named_parameters())[n].nbytes for n in report.cast)
    assert report.bytes_saved == cast // 2 > 0.3 * sum(p.nbytes for p in precast.parameters()) / 2
    assert len(report.verified) in (4, 6)  # inputs of ids can't require a gradient
    assert {*report.cast, *report.left} == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("example", [None, torch.randn(2, 5, 16)])
def test_the_encoder_of_torch_in_each_of_its_paths(norm_first: bool, example: Any) -> None:
    """The fused kernel (eval) and the modules (training), fp32 and low inputs, batched or not."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=norm_first, batch_first=True)
    model = frozen(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval())
    precast = copy.deepcopy(model)
    amphal.precast_(precast, example_inputs=example, plan=plan())
    low = low_names(precast)
    assert low == {n for n, _ in model.named_parameters() if "norm" not in n}
    for x in (torch.randn(2, 5, 16), torch.randn(2, 5, 16).to(LOW), torch.randn(5, 16)):
        assert_alike(model, precast, x)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    assert_alike(model, precast, {"src": torch.randn(2, 5, 16), "src_key_padding_mask": mask})


def test_attention_keeps_what_picks_its_kernel() -> None:
    """Where the dtype of the packed weights decides between two kernels, they stay."""
    attention = frozen(nn.MultiheadAttention(16, 2, batch_first=True).eval())
    x = torch.randn(2, 5, 16)
    precast = copy.deepcopy(attention)
    report = amphal.precast_(precast, example_inputs=(x, x, x), plan=plan())
    assert low_names(precast) == {"out_proj.weight", "out_proj.bias"}
    assert "fused kernel" in report.left["in_proj_weight"]
    assert_alike(attention, precast, (x, x, x))
    low = x.to(LOW)
    assert_alike(attention, precast, (low, low, low))
    odd = frozen(nn.MultiheadAttention(15, 3, bias=False, add_bias_kv=True).eval())
    precast = copy.deepcopy(odd)
    y = torch.randn(5, 2, 15)
    amphal.precast_(precast, example_inputs=(y, y, y), plan=plan())
    assert low_names(precast) == {"in_proj_weight", "out_proj.weight"}
    assert_alike(odd, precast, (y, y, y))


def test_a_parameter_that_is_read_uncast_too_stays() -> None:
    """A tied embedding, a weight that a norm reads, a model's own cast, a view with gaps."""
    report = amphal.precast_(frozen(Tied(True)), example_inputs=torch.tensor([1, 2]), plan=plan())
    assert report.cast == ("mid.weight", "mid.bias")
    assert "embedding" in report.left["embed.weight"]
    report = amphal.precast_(frozen(Tied(False)), example_inputs=torch.tensor([1]), plan=plan())
    assert report.cast == ("mid.weight", "mid.bias", "head.weight")
    model = frozen(Twice())
    precast = copy.deepcopy(model)
    report = amphal.precast_(precast, example_inputs=X, plan=plan())
    assert set(report.cast) == {"w", "shared.weight", "shared.bias", "both.bias"}
    assert "linalg_vector_norm" in report.left["both.weight"]
    assert "itself" in report.left["scale"]
    assert "gaps" in report.left["part"]
    assert "nothing read it" in report.left["never.weight"]
    assert_alike(model, precast, X)


@pytest.mark.parametrize(
    "norm",
    [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm],
)
def test_what_a_parametrization_reads_stays(norm: Callable[[nn.Module], nn.Module]) -> None:
    """With and without example inputs, the plain linear beside it is stored low."""
    torch.manual_seed(0)
    model: Any = frozen(nn.Sequential(norm(nn.Linear(8, 8)), nn.Linear(8, 8)))
    model(X)  # the hook of the old weight norm makes a weight without a gradient, to be copied
    for example in (None, X):
        precast = copy.deepcopy(model)
        report = amphal.precast_(precast, example_inputs=example, plan=plan())
        assert {"1.weight", "1.bias"} <= set(report.cast) <= {"0.bias", "1.weight", "1.bias"}
        assert any("0." in name and "weight" in name for name in report.left)
        assert_alike(model, precast, X)


def test_pins_are_heeded() -> None:
    """A module pinned to fp32 keeps its weights, and can't be pinned once they are low."""
    model: Any = frozen(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    amphal.set_precision(model, "fp32", names="0")
    for example in (None, X):
        precast = copy.deepcopy(model)
        report = amphal.precast_(precast, example_inputs=example, plan=plan())
        assert report.cast == ("1.weight", "1.bias")
        assert_alike(model, precast, X)
    with pytest.raises(PrecastError, match=r"1\.weight"):
        amphal.set_precision(precast, "fp32", names="1")
    amphal.set_precision(precast, "lower_precision", names="1")


def test_a_policy_in_force_decides() -> None:
    """What the region's ops= casts is what is stored, and another policy is refused."""
    model: Any = frozen(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)))
    policy = {"layer_norm": "lower_precision", "linear": "fp32"}
    precast, plain = copy.deepcopy(model), copy.deepcopy(model)
    with amphal.autocast(plan(), ops=policy):
        report = amphal.precast_(precast, example_inputs=X, plan=plan())
        assert report.cast == ("0.weight", "0.bias")
        assert_same(run(precast, X, region=amphal.autocast(plan())), run(model, X))
    with pytest.raises(PrecastError, match="casting policy"):
        run(precast, X)
    amphal.precast_(plain, plan=plan())
    assert low_names(plain) == {"1.weight", "1.bias"}
    with pytest.raises(PrecastError, match="casting policy"):
        run(plain, X, region=amphal.autocast(plan(), ops={"linear": "fp32"}))
    harmless = amphal.autocast(plan(), ops={"softmax": "fp32"})
    assert_same(run(plain, X, region=harmless), run(model, X))


def test_without_examples_only_what_is_certain() -> None:
    """A module of somebody else's above it might read the weight: left, and says what to give."""
    report = amphal.precast_(frozen(Tied(False)), plan=plan())
    assert not report.cast
    assert "Tied might read it as well: give example_inputs" in report.left["mid.weight"]
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Flatten(), nn.LazyLinear(2))
    frozen(model[:2])
    assert amphal.precast_(model, plan=plan()).cast == ("0.weight", "0.bias", "1.weight")
    hooked: Any = frozen(nn.Sequential(nn.Linear(8, 8)))
    hooked[0].register_forward_hook(lambda module, args, out: out * module.weight.sum())
    assert "hook" in amphal.precast_(hooked, plan=plan()).left["0.weight"]


def test_unfit_parameters_stay() -> None:
    """Other dtypes, gradients, shared storage; what trains is not touched or listed."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    frozen(model[:4])
    model[0].double()
    model[1].half()
    model[2].weight.grad = torch.ones(8, 8)
    model[3].weight.data = torch.empty(16, 8)[:8]
    model.register_buffer("view", model[3].weight.data[:2])
    report = amphal.precast_(model, plan=plan())
    assert not report.cast
    reasons = [report.left[f"{i}.weight"] for i in range(4)]
    for word, reason in zip(("float64", "float16", "gradient", "storage"), reasons, strict=True):
        assert word in reason
    assert "4.weight" not in report.left


def test_outputs_that_would_change_are_found_and_their_cause_is_left() -> None:
    """A model that looks at the dtype of a weight: that one stays, the others are stored low."""

    class Peeks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x + torch.finfo(self.layers[3].get_parameter("weight").dtype).eps

    model = frozen(Peeks())
    precast = copy.deepcopy(model)
    report = amphal.precast_(precast, example_inputs=X, plan=plan())
    assert report.left == {"layers.3.weight": "the outputs change when it is stored low"}
    assert len(report.cast) == 11
    assert_alike(model, precast, X)


def test_a_model_that_is_not_reproducible_is_refused() -> None:
    """Nothing can be compared then; the model is as it was."""

    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) + self.calls

    model = frozen(Counts(8, 8))
    with pytest.raises(PrecastError, match="second run"):
        amphal.precast_(model, example_inputs=X, plan=plan())
    assert not low_names(model)
    model(X)


def test_the_trial_leaves_nothing_behind() -> None:
    """Running statistics, gradients, flags, random state and the inputs are as they were."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
            self.head = nn.Linear(8, 2)
            self.register_buffer("seen", torch.zeros(1))
            self.seen: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + 1
            return self.head(self.net(x.mul_(2)))

    model = Writes().train()
    frozen(model.net)
    model.net[1].eval()
    model.head.weight.grad = torch.ones(2, 8)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    x, state = X.clone(), torch.get_rng_state()
    report = amphal.precast_(model, example_inputs=x, plan=plan())
    assert report.cast == ("net.0.weight", "net.0.bias")
    assert torch.equal(x, X)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    assert torch.equal(model.head.weight.grad, torch.ones(2, 8))
    assert model.head.bias.grad is None
    assert [m.training for m in model.net] == [True, False, True]


def test_inputs_in_every_form() -> None:
    """A tensor, arguments, keyword arguments, both, or a function of the model."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, *, y: float = 0.0) -> dict[str, Any]:
            return {"out": [self.linear(x) + y], "n": 1}

    calls = [X, (X,), [X], {"x": X, "y": 1.0}, ((X,), {"y": 2.0}), lambda m: m(X, y=3.0)]
    for example in calls:
        report = amphal.precast_(frozen(Adds()), example_inputs=example, plan=plan())
        assert len(report.cast) == 2
    with pytest.raises(ArgumentError, match="int"):
        amphal.precast_(frozen(Adds()), example_inputs=3, plan=plan())
    with pytest.raises(ArgumentError, match="no tensors"):
        amphal.precast_(frozen(Adds()), example_inputs=lambda m: None, plan=plan())
    with pytest.raises(TypeError, match="unexpected"):
        amphal.precast_(frozen(Adds()), example_inputs={"z": X}, plan=plan())


def test_training_beside_frozen_weights_gives_the_same_losses() -> None:
    """Twenty steps of adapters on a frozen stack: every loss, and every trained weight."""

    def losses(precast: bool) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        stack = frozen(nn.Sequential(Block(32, 2), Block(32, 2)))
        model = nn.Sequential(nn.Linear(32, 32), stack, nn.Linear(32, 4))
        x, y = torch.randn(2, 6, 32), torch.randint(4, (12,))
        if precast:
            assert len(amphal.precast_(model, example_inputs=x, plan=plan()).cast) == 16
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer, found = torch.optim.AdamW(trained, lr=1e-2), []
        for _ in range(20):
            optimizer.zero_grad()
            with amphal.autocast(plan()):
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found, [p.detach() for p in trained]

    want, got = losses(False), losses(True)
    assert got[0] == want[0]
    assert want[0][-1] < want[0][0]
    assert_same(got[1], want[1])


def test_a_plan_of_full_precision_does_nothing() -> None:
    """It says so, and the model needs no region."""
    model: Any = frozen(nn.Sequential(nn.Linear(8, 8)))
    report = amphal.precast_(model, plan=plan("fp32"))
    assert not report.cast
    assert report.bytes_saved == 0
    assert set(report.left.values()) == {"the plan is full precision"}
    assert model[0].weight.dtype is FULL
    model(X)


def test_without_a_plan_that_of_the_parameters_device_is_taken() -> None:
    """What detect() says of it."""
    model: Any = frozen(nn.Sequential(nn.Linear(8, 8)))
    assert amphal.precast_(model).dtype is amphal.detect("cpu").dtype


def test_a_second_call_finds_it_done() -> None:
    """The same report; what was frozen since is added; another precision is refused."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    frozen(model[0])
    first = amphal.precast_(model, plan=plan())
    assert amphal.precast_(model, plan=plan()) == first
    frozen(model)
    assert len(amphal.precast_(model, example_inputs=X, plan=plan()).cast) == 4
    with pytest.raises(PrecastError, match="undo_precast_"):
        amphal.precast_(model, plan=plan("fp16"))


def test_a_model_that_is_not_frozen_is_told_how_to_freeze_it() -> None:
    """Nothing frozen, nothing done: the report says what to call."""
    report = amphal.precast_(torch.nn.Linear(4, 4), plan=amphal.detect("cpu", precision="bf16"))
    assert report.cast == ()
    assert "model.requires_grad_(False)" in str(report)


def test_the_report_is_for_people_and_programs() -> None:
    """A line for each reason; plain values; it pickles."""
    report = amphal.precast_(frozen(Tied(True)), example_inputs=torch.tensor([1]), plan=plan())
    assert "2 parameters are stored in bf16" in str(report)
    assert "left embed.weight: embedding reads it uncast" in str(report)
    assert report.to_dict()["bytes_saved"] == report.bytes_saved == (64 + 8) * 2
    assert pickle.loads(pickle.dumps(report)) == report


def test_what_is_no_model_is_refused() -> None:
    """Also a compiled one, whose kernels can't be watched."""
    with pytest.raises(ArgumentTypeError, match=r"nn\.Module"):
        amphal.precast_([1])  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="plan"):
        amphal.precast_(nn.Linear(2, 2), plan="bf16")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="compile"):
        amphal.precast_(torch.compile(nn.Linear(2, 2)), plan=plan())  # type: ignore[arg-type]


def test_recurrent_modules_of_every_kind() -> None:
    """Bidirectional, projected, without bias, packed sequences."""
    for make in (
        lambda: nn.LSTM(8, 6, 2, bidirectional=True, batch_first=True),
        lambda: nn.LSTM(8, 6, proj_size=3, batch_first=True),
        lambda: nn.GRU(8, 6, bias=False, batch_first=True),
        lambda: nn.RNN(8, 6, nonlinearity="relu", batch_first=True),
    ):
        model: Any = frozen(make())
        precast = copy.deepcopy(model)
        x = torch.randn(2, 4, 8)
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2]), batch_first=True)
        report = amphal.precast_(precast, example_inputs=x, plan=plan())
        assert not report.left
        assert precast._flat_weights[0] is precast.weight_ih_l0
        assert_alike(model, precast, x)
        assert_same(run(model, (packed,))[:1], run(precast, (packed,))[:1])
