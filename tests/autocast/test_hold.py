"""``amphal.hold_casts``: fewer casts, and the same bits."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amphal
from amphal.errors import ArgumentError, ArgumentTypeError, AutocastStateError

BF16, FP16 = torch.bfloat16, torch.float16
REGIONS = [amphal.autocast, torch.autocast]


@pytest.fixture(autouse=True)
def _named_dtypes_may_be_slow_here() -> Iterator[None]:
    """Tests name float16, which this CPU may do slowly; test_choice.py has that warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*asks for fp16")
        warnings.filterwarnings("ignore", ".* is slow on device")
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Whatever a test does in its blocks, nesting count and hooks are as before."""
    yield
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0
    assert not hooks._global_forward_pre_hooks


class Casts(TorchDispatchMode):
    """Counts the casts of matrices to a low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].dim() == 2:
            self.count += 1
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """Plain layers, a tied weight, an attention that reads its child's weight, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attention(self.norm(x), x, x, need_weights=False)[0]
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return nn.functional.linear(x, self.embed.weight)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


IDS = torch.arange(10).view(2, 5)


def sgd(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def compiled_sgd(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), foreach=True)
    torch.compile(optimizer.step, backend="aot_eager")()


def copy_one(model: nn.Module) -> None:
    with torch.no_grad():
        model.up.weight.copy_(net(1).up.weight)  # type: ignore[union-attr, operator]


def attention_child(model: nn.Module) -> None:
    with torch.no_grad():
        model.attention.out_proj.weight.mul_(2)  # type: ignore[union-attr, operator]


def load(model: nn.Module) -> None:
    model.load_state_dict(net(1).state_dict())


def assign(model: nn.Module) -> None:
    model.load_state_dict(net(1).state_dict(), assign=True)


def swap_with_ema(model: nn.Module) -> None:
    for mine, other in zip(model.parameters(), net(1).parameters(), strict=True):
        mine.data, other.data = other.data, mine.data


def fused_adam(model: nn.Module) -> None:
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def nothing(model: nn.Module) -> None:
    pass


CHANGES: list[Callable[[nn.Module], None]] = [
    nothing,
    sgd,
    fused_adam,
    compiled_sgd,
    copy_one,
    attention_child,
    load,
    assign,
    swap_with_ema,
]


def trained(region: Any, change: Callable[[nn.Module], None], held: bool) -> list[Tensor]:
    """Outputs and gradients of forwards with ``change`` between them, each in its own region."""
    model = net()
    found = []
    with amphal.hold_casts(model) if held else torch.enable_grad():
        for i in range(3):
            for no_grad in (True, False):
                with torch.set_grad_enabled(not no_grad), region("cpu", BF16):
                    out = model((IDS + i) % 11)
                found.append(out.detach().clone())
            out.float().square().mean().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            change(model)
    return found


@pytest.mark.parametrize("region", REGIONS, ids=["amphal", "torch"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_the_bits_are_torchs(region: Any, change: Callable[[nn.Module], None]) -> None:
    """Outputs and gradients under one hold equal torch's regions without, whatever changes."""
    held, plain = trained(region, change, True), trained(torch.autocast, change, False)
    assert len(held) == len(plain) > 30
    assert all(torch.equal(a, b) for a, b in zip(held, plain, strict=True))


@pytest.mark.parametrize("region", REGIONS, ids=["amphal", "torch"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_each_weight_is_cast_once(region: Any, dtype: torch.dtype) -> None:
    """Three forwards cast each weight once, in a dtype that is not the device's default too."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    x = torch.randn(2, 4, dtype=dtype)
    with amphal.hold_casts(model), Casts() as casts:
        for _ in range(3):
            with region("cpu", dtype):
                model(x)
        assert casts.count == 3
        torch.optim.SGD(model.parameters()).step()
        for _ in range(3):
            with region("cpu", dtype):
                model(x)
        assert casts.count == 6


def test_the_casts_end_with_the_block() -> None:
    """After the block each region casts again, and a bare write is seen."""
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    with amphal.hold_casts(layer), amphal.autocast("cpu", BF16):
        layer(x)
    layer.weight.data.fill_(1)
    with amphal.autocast("cpu", BF16):
        assert layer(x)[0, 0].item() == 4


@pytest.mark.parametrize("region", REGIONS, ids=["amphal", "torch"])
def test_changes_of_dtype_are_seen(region: Any) -> None:
    """Regions of two dtypes under one hold: each output is what it is without."""
    model = net()
    outputs = []
    for held in (True, False):
        with amphal.hold_casts(model) if held else torch.enable_grad():
            for dtype in (BF16, FP16, FP16, BF16):
                with region("cpu", dtype):
                    outputs.append(model(IDS))
    assert [o.dtype for o in outputs[:4]] == [BF16, FP16, FP16, BF16]
    assert all(torch.equal(a, b) for a, b in zip(outputs[:4], outputs[4:], strict=True))


def test_nested_regions_of_other_dtypes_are_seen() -> None:
    """A region inside another, with full precision between them, leaves no cast to the outer."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with amphal.hold_casts(layer), amphal.autocast("cpu", BF16):
        for _ in range(2):
            assert layer(x).dtype is BF16
            with amphal.autocast("cpu", enabled=False), amphal.autocast("cpu", FP16):
                assert nn.functional.linear(x, layer.weight).dtype is FP16
            assert nn.functional.linear(x, layer.weight).dtype is BF16


def test_functional_calls_in_regions_of_two_dtypes() -> None:
    """amphal's regions drop casts of another dtype where no module is called too."""
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(2, 4)
    with amphal.hold_casts(nn.Linear(2, 2)):
        for dtype in (FP16, BF16, FP16):
            with amphal.autocast("cpu", dtype):
                assert nn.functional.linear(x, weight).dtype is dtype


def test_modules_that_were_not_named_are_watched() -> None:
    """A critic beside the held model, and a child called past its parent, see their changes."""
    first, critic, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.ones(1, 4)
    with amphal.hold_casts(nn.Sequential(first)):
        for layer in (first, critic):
            for value in (1.0, 2.0):
                with torch.no_grad():
                    layer.weight.fill_(value)
                    layer.bias.zero_()
                with torch.autocast("cpu", BF16):
                    assert layer(x)[0, 0].item() == 4 * value


def test_an_input_that_is_a_changed_leaf_is_seen() -> None:
    """An adversarial example is a leaf that torch caches like a weight."""
    layer = nn.Linear(4, 4, bias=False)
    nn.init.ones_(layer.weight)
    x = torch.ones(1, 4, requires_grad=True)
    with amphal.hold_casts(layer):
        for value in (1.0, 2.0):
            x.data.fill_(value)
            with torch.autocast("cpu", BF16):
                assert layer(x)[0, 0].item() == 4 * value


def test_averaged_weights_are_seen() -> None:
    """``AveragedModel.update_parameters`` between two forwards of the average."""
    model = net()
    average = AveragedModel(model)
    outputs = []
    with amphal.hold_casts(model, average):
        for seed in (1, 2):
            model.load_state_dict(net(seed).state_dict())
            average.update_parameters(model)
            with torch.autocast("cpu", BF16):
                outputs.append(average(IDS))
            with torch.autocast("cpu", BF16, cache_enabled=False):
                assert torch.equal(outputs[-1], average(IDS))
    assert not torch.equal(*outputs)


def test_inference_mode_before_training() -> None:
    """Casts made in inference mode are not what a forward with gradients finds."""
    model = net()
    with amphal.hold_casts(model):
        with torch.inference_mode(), torch.autocast("cpu", BF16):
            model(IDS)
        with torch.autocast("cpu", BF16):
            model(IDS).float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_accumulated_gradients_are_torchs() -> None:
    """Four micro-batches under one hold: the casts serve four graphs, the sums are the same."""
    grads = []
    for held in (True, False):
        model = net()
        with amphal.hold_casts(model) if held else torch.enable_grad():
            for i in range(4):
                with torch.autocast("cpu", BF16):
                    loss = model((IDS + i) % 11).float().square().mean()
                loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    """A block that backward computes again has the same gradients under a hold."""
    grads = []
    for held in (True, False):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model.load_state_dict({k: torch.ones_like(v) / 8 for k, v in model.state_dict().items()})
        with amphal.hold_casts(model) if held else torch.enable_grad():
            for i in range(2):
                x = torch.full((2, 4), 0.5 + i, requires_grad=True)
                with amphal.autocast("cpu", BF16):
                    out = checkpoint(model, x, use_reentrant=reentrant)
                out.float().square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_regions_with_a_policy_do_not_hold() -> None:
    """Under ``ops=`` each region has its own casts, and its outputs are those without a hold."""
    model = net()
    outputs = []
    for held in (True, False):
        with amphal.hold_casts(model) if held else torch.enable_grad():
            for ops in (None, {"linear": "fp32"}, None, {"linear": "fp32"}):
                with amphal.autocast("cpu", BF16, ops=ops):
                    outputs.append(model(IDS))
    assert all(torch.equal(a, b) for a, b in zip(outputs[:4], outputs[4:], strict=True))
    assert not torch.equal(outputs[0].float(), outputs[1].float())


def test_blocks_nest_and_end_in_any_order() -> None:
    """The inner block's end leaves the outer one holding; so do blocks that cross."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4, dtype=BF16)
    for crossed in (False, True):
        first, second = amphal.hold_casts(model), amphal.hold_casts(model)
        first.__enter__()
        second.__enter__()
        (first if crossed else second).__exit__(None, None, None)
        with Casts() as casts:
            for _ in range(3):
                with amphal.autocast("cpu", BF16):
                    model(x)
        assert casts.count == 1
        (second if crossed else first).__exit__(None, None, None)


def test_an_exception_ends_the_block() -> None:
    """The user's exception arrives, and nothing is left."""
    with (
        pytest.raises(ZeroDivisionError),
        amphal.hold_casts(nn.Linear(2, 2)),
        amphal.autocast("cpu", BF16),
    ):
        raise ZeroDivisionError


def test_a_generator_holds_until_it_is_closed() -> None:
    """A block in a generator ends with it, also inside a region that began before."""

    def batches(model: nn.Module) -> Generator[int, None, None]:
        with amphal.hold_casts(model):
            yield from itertools.count()

    model = nn.Linear(2, 2)
    running = batches(model)
    with amphal.autocast("cpu", BF16):
        next(running)
        model(torch.ones(1, 2))
    running.close()
    assert not torch.is_autocast_enabled("cpu")


def test_another_thread_cannot_end_a_block() -> None:
    """The nesting count is the thread's: leaving elsewhere is an error that says so."""
    block = amphal.hold_casts(nn.Linear(2, 2))
    block.__enter__()
    found: list[BaseException] = []

    def leave() -> None:
        try:
            block.__exit__(None, None, None)
        except AutocastStateError as error:
            found.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert "another thread" in str(found[0])
    from amphal._autocast import region

    region.hold(False)  # what the test left held in this thread


def test_other_threads_see_their_changes() -> None:
    """A thread without a block may run a held model: changed weights are seen there."""
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    found: list[float] = []

    def run() -> None:
        with torch.autocast("cpu", BF16):
            found.append(layer(x)[0, 0].item())

    with amphal.hold_casts(layer):
        for value in (1.0, 2.0):
            with torch.no_grad():
                layer.weight.fill_(value)
            with torch.autocast("cpu", BF16):
                layer(x)
            with torch.no_grad():
                layer.weight.fill_(value + 2)
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    assert found == [12.0, 16.0]


def test_a_compiled_model_has_the_same_graphs() -> None:
    """Neither the block around a compiled model nor the one inside it makes another graph."""
    first, x = nn.Linear(4, 4), torch.randn(2, 4)
    model = nn.Sequential(first, nn.Linear(4, 4))
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            out: Tensor = model(x)
            return out

    compiled = torch.compile(forward, backend=count, fullgraph=True)
    before = compiled(x)
    with amphal.hold_casts(model):
        assert torch.equal(compiled(x), before)
        kept = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            first.weight.zero_()
        assert torch.allclose(compiled(x), forward(x))
        model.load_state_dict(kept)
    assert torch.equal(compiled(x), before)
    assert count.frame_count == 1


def test_frozen_weights_are_for_precast() -> None:
    """torch caches no casts of frozen weights: the warning says so and names what does."""
    with (
        pytest.warns(amphal.PrecisionWarning, match="precast_"),
        amphal.hold_casts(nn.Linear(2, 2).requires_grad_(False)),
    ):
        pass


@pytest.mark.parametrize("given", [(), (3,), (nn.Linear(2, 2), None)])
def test_only_modules_are_held(given: tuple[Any, ...]) -> None:
    """Something else is an error before anything changes."""
    with pytest.raises(ArgumentTypeError, match="hold_casts"):
        amphal.hold_casts(*given)


def test_fsdp_is_refused() -> None:
    """Held casts would keep a full copy of weights that FSDP frees after each layer."""
    code = (
        "import torch, amphal, tempfile\n"
        "import torch.distributed as dist\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "dist.init_process_group('gloo', init_method=f'file://{tempfile.mkdtemp()}/s',"
        " rank=0, world_size=1)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4))\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "fully_shard(model[0], mesh=init_device_mesh('cpu', (1,)))\n"
        "try: amphal.hold_casts(model)\n"
        "except amphal.errors.ArgumentError as error: print('FSDP' in str(error))\n"
        "dist.destroy_process_group()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tempfile.gettempdir()
    )
    assert done.stdout.strip() == "True", done.stderr
    assert issubclass(ArgumentError, amphal.AmphalError)


def test_the_model_is_unchanged() -> None:
    """No hook is put on a module, nor on a copy that is made in the block."""
    model = net()
    with amphal.hold_casts(model):
        assert all(not m._forward_pre_hooks for m in model.modules())
        assert all(not m._forward_pre_hooks for m in copy.deepcopy(model).modules())
