"""``amphal.set_precision``: modules pinned to a precision, from outside."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import amphal
from amphal import set_precision
from amphal.errors import ArgumentError, ArgumentTypeError

LOW, FULL = torch.bfloat16, torch.float32
pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.norm(self.linear(x)) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def region() -> torch.autocast:
    return amphal.autocast("cpu", dtype="bf16")


class Seen:
    """The dtypes in which a module computed: its inputs' and weights'."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dtypes: list[tuple[torch.dtype, torch.dtype]] = []
        real = nn.functional.linear

        def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            self.dtypes.append((x.dtype, real(x, w, b).dtype))
            return real(x, w, b)

        monkeypatch.setattr(nn.functional, "linear", linear)


def test_a_module_runs_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inputs are cast up, it computes in float32, and its outputs are cast down."""
    net, seen = Net(), Seen(monkeypatch)
    assert set_precision(net, "fp32", names="layers.1") == ("layers.1",)
    with region():
        out = net(torch.randn(3, 4).to(LOW))
    assert seen.dtypes == [(LOW, LOW), (FULL, FULL), (LOW, LOW)]
    assert out.dtype is LOW


def test_values_are_those_of_switching_autocast_off_by_hand() -> None:
    """A pin is what one would write around the module, bit for bit."""
    block, x = Block(), torch.randn(3, 4).to(LOW)
    with region(), torch.autocast("cpu", enabled=False):
        want = block(x.float()).to(LOW)
    set_precision(block, "fp32")
    with region():
        assert torch.equal(block(x), want)


def test_a_module_runs_in_low_precision() -> None:
    """Parameters are cast too, and gradients come back to them in float32."""
    norm, x = nn.LayerNorm(4), torch.randn(3, 4)
    want = nn.functional.layer_norm(x.to(LOW), (4,), norm.weight.to(LOW), norm.bias.to(LOW))
    set_precision(norm, "lower_precision")
    with region():
        out = norm(x)
    assert torch.equal(out, want)
    out.float().square().sum().backward()
    assert norm.weight.grad is not None
    assert norm.weight.grad.dtype is FULL
    assert norm.weight.dtype is FULL


def test_outside_a_region_a_pin_does_nothing() -> None:
    """Without autocast, and with it off, the module is as it was."""
    block, x = Block(), torch.randn(3, 4)
    want = block(x)
    set_precision(block, "lower_precision")
    assert torch.equal(block(x), want)
    with amphal.autocast("cpu", enabled=False):
        assert torch.equal(block(x), want)


def test_keyword_arguments_and_the_signature_are_kept() -> None:
    """Frameworks look at a model's signature to decide what to pass."""
    block = Block()
    before = inspect.signature(block.forward)
    set_precision(block, "fp32")
    assert inspect.signature(block.forward) == before
    with region():
        assert torch.equal(block(torch.zeros(1, 4), scale=0.0), torch.zeros(1, 4).to(LOW))


def test_by_name_and_by_type() -> None:
    """Patterns and types each choose, and together they add up."""
    net = Net()
    assert set_precision(net, "fp32", names="layers.*.norm") == ("layers.0.norm", "layers.1.norm")
    assert set_precision(net, "fp32", types=nn.Linear) == (
        "layers.0.linear",
        "layers.1.linear",
        "head",
    )
    assert len(set_precision(net, None, names=["head"], types=(nn.Linear, nn.LayerNorm))) == 5
    assert set_precision(net, "fp32") == ("",)


def test_a_pin_can_be_changed_and_undone() -> None:
    """The last one holds; None leaves no trace, and gives back a forward that was there before."""
    block = Block()
    before = dict(vars(block))
    for precision in ("fp32", "lower_precision", "lower_precision"):
        set_precision(block, precision)
    with region():
        assert block(torch.randn(2, 4)).dtype is LOW
    set_precision(block, None)
    assert vars(block).keys() == before.keys()
    assert not block._forward_pre_hooks
    own = lambda x: x + 1  # noqa: E731
    block.forward = own  # type: ignore[assignment]
    set_precision(block, "fp32")
    with region():
        assert block(torch.zeros(2, 4)).sum() == 8
    set_precision(block, None)
    assert block.forward is own


def test_state_dict_deepcopy_and_pickle() -> None:
    """The state dict is the same, and copies are pinned on their own."""
    net, x = Net(), torch.randn(3, 4)
    keys = list(net.state_dict())
    set_precision(net, "fp32", names="layers.*.linear")
    assert list(net.state_dict()) == keys
    with region():
        want = net(x)
        copies: list[Any] = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
        for other in copies:
            assert torch.equal(other(x), want)
            with torch.no_grad():
                other.layers[0].linear.weight.zero_()
            assert not torch.equal(other(x), want)
            set_precision(other, None, names="layers.*.linear")
            assert not torch.equal(other(x), want)
        assert torch.equal(net(x), want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("precision", ["fp32", "lower_precision"])
def test_compiled_without_a_graph_break(backend: str, precision: Any) -> None:
    """The compiled model computes what the eager one does; inductor within its rounding."""
    torch._dynamo.reset()
    net, x = Net(), torch.randn(3, 4)
    set_precision(net, precision, types=nn.LayerNorm)
    set_precision(net, "fp32", names="head")
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    with region():
        want, got = net(x), compiled(x)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    got.float().sum().backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("precision", ["fp32", "lower_precision"])
def test_in_distributed_data_parallel(precision: Any) -> None:
    """DDP reduces the gradients of pinned modules like the others."""
    net, x = Net(), torch.randn(3, 4)
    set_precision(net, precision, names="layers.*")
    alone = copy.deepcopy(net)
    for model in (nn.parallel.DistributedDataParallel(net), alone):
        with region():
            out = model(x)
        out.float().sum().backward()
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def test_torch_s_fused_layers_do_not_go_past_a_pin() -> None:
    """A transformer layer in eval mode uses its submodules' weights directly, but not if pinned."""
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0).eval()
    set_precision(layer, "fp32", names="norm1")
    seen = []
    layer.norm1.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    with region(), torch.no_grad():
        layer(torch.randn(1, 3, 8))
    assert seen == [LOW]


def test_mistakes_are_told() -> None:
    """A wrong precision, module or pattern is an error that changes nothing."""
    net = Net()
    with pytest.raises(ArgumentError, match="'fp32'"):
        set_precision(net, "fp23")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"layers\.0\.norm"):
        set_precision(net, "fp32", names="layer.0.norm")
    with pytest.raises(ArgumentTypeError):
        set_precision(Net, "fp32")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError):
        set_precision(net, "fp32", types="Linear")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError):
        set_precision(net, "fp32", names=[nn.Linear])  # type: ignore[list-item]
    assert "forward" not in vars(net)


@dataclasses.dataclass(frozen=True)
class Output:
    hidden: torch.Tensor
    step: int = 3


class Named(OrderedDict[str, torch.Tensor]):
    """A mapping with attributes, as model outputs are, whose constructor takes other things."""

    def __init__(self, hidden: torch.Tensor | None = None) -> None:
        super().__init__()
        self.step = 3
        if hidden is not None:
            self["hidden"] = hidden

    def __reduce__(self) -> Any:
        return type(self), (), {"step": self.step}, None, iter(self.items())


class Wrapping(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)
        self.seen: Any = None

    def forward(self, given: Any) -> Any:
        self.seen = given
        hidden = given["hidden"] if isinstance(given, dict) else given.hidden
        return self.kind(self.linear(hidden))


@pytest.mark.parametrize("kind", [Output, Named])
def test_records_keep_their_type_and_attributes(kind: Any) -> None:
    """Dataclasses and subclasses of dict are cast inside, going in and coming out."""
    module = Wrapping(kind)
    set_precision(module, "fp32")
    given = kind(torch.randn(2, 4).to(LOW))
    with region():
        out = module(given)
    values = [v["hidden"] if isinstance(v, dict) else v.hidden for v in (module.seen, out, given)]
    assert [v.dtype for v in values] == [FULL, LOW, LOW]
    assert type(module.seen) is type(out) is kind
    assert module.seen.step == out.step == 3


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_can_be_pinned_to_low_precision(training: bool) -> None:
    """Its input is cast, its weights stay beside the statistics, which are updated."""
    norm = nn.BatchNorm1d(4)
    net = nn.Sequential(nn.Linear(4, 4), norm).train(training)
    assert norm.running_mean is not None
    before = norm.running_mean.clone()
    set_precision(net, "lower_precision")
    with region():
        out = net(torch.randn(8, 4))
    assert out.dtype is LOW
    assert torch.equal(norm.running_mean, before) is not training
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is FULL for p in net.parameters())


def test_a_shared_module_is_found_under_every_name() -> None:
    """The second name of a module pins it too."""
    net = Net()
    net.tail = net.head
    assert set_precision(net, "fp32", names="tail") == ("tail",)
    with region():
        assert net.head(torch.randn(1, 4)).dtype is LOW
    assert "forward" in vars(net.head)
    assert set_precision(net, None, names=["head", "tail"]) == ("head", "tail")
    assert "forward" not in vars(net.head)


@pytest.mark.parametrize("wrong", [{"names": 3}, {"types": int}, {"types": (nn.Linear, int)}])
def test_names_and_types_of_the_wrong_type_are_told(wrong: Any) -> None:
    """names are strings and types are module classes."""
    with pytest.raises(ArgumentTypeError):
        set_precision(Net(), "fp32", **wrong)
