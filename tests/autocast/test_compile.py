"""torch.compile, torch.export and jit.trace: every way to write a region gives its dtype.

torch-level forms that lose a region in silence elsewhere (a subclass built inside a strict export,
a wrapper that holds a region) are all here, each under every tracer.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import amphal
from amphal.testing import simulate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.ones(4, 4)
PLAN = amphal.detect(amphal.Hardware("cpu", "described"), precision="fp32")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        yield
    assert not torch.is_autocast_enabled("cpu")


with warnings.catch_warnings():
    warnings.simplefilter("ignore", amphal.PrecisionWarning)
    REGION = amphal.autocast("cpu", BF16)
    BF16_PLAN = amphal.detect("cpu", precision="bf16")


class Holder:
    """A module attribute, as some training frameworks keep their region."""

    region = REGION


def constructed(x: torch.Tensor) -> torch.Tensor:
    with amphal.autocast("cpu", dtype=BF16):
        return x @ x


def by_name(x: torch.Tensor) -> torch.Tensor:
    with amphal.autocast(device_type="cpu:0", dtype="bf16"):
        return x @ x


def by_device(x: torch.Tensor) -> torch.Tensor:
    with amphal.autocast(x.device, BF16):
        return x @ x


def by_plan(x: torch.Tensor) -> torch.Tensor:
    with amphal.autocast(BF16_PLAN):
        return x @ x


def by_plan_method(x: torch.Tensor) -> torch.Tensor:
    with BF16_PLAN.autocast():
        return x @ x


def _factory() -> torch.autocast:
    return amphal.autocast("cpu", BF16)


def through_a_factory(x: torch.Tensor) -> torch.Tensor:
    with _factory():
        return x @ x


@contextlib.contextmanager
def _wrapper() -> Iterator[None]:
    with amphal.autocast("cpu", BF16):
        yield


def through_a_context_manager(x: torch.Tensor) -> torch.Tensor:
    with _wrapper():
        return x @ x


@amphal.autocast("cpu", BF16)
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def decorated_inside(x: torch.Tensor) -> torch.Tensor:
    @amphal.autocast("cpu", BF16)
    def inner(y: torch.Tensor) -> torch.Tensor:
        return y @ y

    return inner(x)


def from_a_global(x: torch.Tensor) -> torch.Tensor:
    with REGION:
        return x @ x


def from_an_attribute(x: torch.Tensor) -> torch.Tensor:
    with Holder.region:
        return x @ x


def _make_closure() -> Callable[[torch.Tensor], torch.Tensor]:
    region = REGION

    def from_a_closure(x: torch.Tensor) -> torch.Tensor:
        with region:
            return x @ x

    return from_a_closure


def nested(x: torch.Tensor) -> torch.Tensor:
    with amphal.autocast("cpu", FP16):
        with amphal.autocast("cpu", enabled=False):
            y = x @ x
        with amphal.autocast("cpu", "fp32"):
            y = y @ y
        with amphal.autocast("cpu", BF16):
            return y @ y


FORMS = [
    constructed,
    by_name,
    by_device,
    by_plan,
    by_plan_method,
    through_a_factory,
    through_a_context_manager,
    decorated,
    decorated_inside,
    from_a_global,
    from_an_attribute,
    _make_closure(),
    nested,
]
forms = pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)


class Model(torch.nn.Module):
    """A module whose forward is the form under test."""

    def __init__(self, form: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(x)


@forms
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_fullgraph(form: Any, backend: str) -> None:
    """One graph, the region's dtype, and nothing left enabled."""
    compiled = torch.compile(form, fullgraph=True, backend=backend)
    assert form(X).dtype is BF16
    assert compiled(X).dtype is BF16
    assert compiled(X).dtype is BF16


@forms
@pytest.mark.parametrize("strict", [True, False])
def test_export(form: Any, strict: bool) -> None:
    """The exported program keeps the region, strict or not; a subclass built inside loses it."""
    program = torch.export.export(Model(form), (X,), strict=strict)
    assert program.module()(X).dtype is BF16


@forms
def test_jit_trace(form: Any) -> None:
    """The traced casts are the region's."""
    traced = torch.jit.trace(Model(form), (X,), check_trace=False)
    assert traced(X).dtype is BF16


def test_inductor() -> None:
    """The default compiler as well, once."""
    assert torch.compile(constructed, fullgraph=True)(X).dtype is BF16


def test_a_bare_decorator_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is made when the function is traced."""
    monkeypatch.setenv("AMPHAL_DEVICE", "cpu")
    monkeypatch.setenv("AMPHAL_PRECISION", "bf16")
    amphal.detect.cache_clear()

    @amphal.autocast
    def bare(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    assert torch.compile(bare, fullgraph=True, backend="eager")(X).dtype is BF16
    for strict in (True, False):
        assert torch.export.export(Model(bare), (X,), strict=strict).module()(X).dtype is BF16


def test_a_region_around_a_compiled_function() -> None:
    """The compiled function runs in the region that surrounds its call, in any order of calls."""
    compiled = torch.compile(lambda x: x @ x, fullgraph=True, backend="aot_eager")
    for dtype, want in ((BF16, BF16), (FP16, FP16), ("fp32", FP32), (BF16, BF16), (FP16, FP16)):
        with amphal.autocast("cpu", dtype):
            assert compiled(X).dtype is want
    assert compiled(X).dtype is FP32


def test_a_region_passed_as_an_argument_compiles_once() -> None:
    """Equal arguments give the same object, so Dynamo's guard on it holds."""
    counter = torch._dynamo.testing.CompileCounter()

    def run(x: torch.Tensor, region: torch.autocast) -> torch.Tensor:
        with region:
            return x @ x

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for _ in range(4):
        assert compiled(X, amphal.autocast("cpu", BF16)).dtype is BF16
    assert counter.frame_count == 1


def test_a_graph_break_inside_a_region_restores_it() -> None:
    """Before and after the break the region holds; after the function it does not."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        with amphal.autocast("cpu", BF16):
            y = x @ x
            torch._dynamo.graph_break()
            return y @ x.to(y.dtype)

    assert torch.compile(broken, backend="eager")(X).dtype is BF16


def test_autograd_through_a_compiled_region() -> None:
    """Backward runs, and gradients have the parameters' dtype."""
    weight = torch.nn.Parameter(torch.eye(4))

    def loss(x: torch.Tensor) -> torch.Tensor:
        with amphal.autocast("cpu", BF16):
            return (x @ weight).float().sum()

    torch.compile(loss, fullgraph=True, backend="aot_eager")(X).backward()
    assert weight.grad is not None
    assert weight.grad.dtype is FP32


def test_an_error_while_tracing_says_what_is_wrong() -> None:
    """A wrong argument inside a compiled function is reported, and no region stays on."""

    def wrong(x: torch.Tensor) -> torch.Tensor:
        with amphal.autocast("cpu", "bf17"):
            return x @ x

    with pytest.raises(Exception, match="bf17"):
        torch.compile(wrong, fullgraph=True, backend="eager")(X)


def test_a_simulated_device_can_be_traced() -> None:
    """Fake tensors of an absent device under a region, through export's own tracer."""
    with simulate(amphal.Hardware("cuda", "H100", vendor="nvidia", capability=(9, 0))):
        with torch._subclasses.FakeTensorMode(), torch.no_grad():
            x = torch.empty(4, 4, device="cuda")
            with amphal.autocast("cuda"):
                assert (x @ x).dtype is BF16
            assert (x @ x).dtype is FP32


@pytest.mark.parametrize("strict", [True, False])
def test_a_region_must_be_inside_what_is_exported(strict: bool) -> None:
    """torch drops a region around the export call; decorating forward keeps it."""

    class Plain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    with amphal.autocast("cpu", BF16):
        around = torch.export.export(Plain(), (X,), strict=strict)
    assert around.module()(X).dtype is FP32
    model = Plain()
    model.forward = amphal.autocast("cpu", BF16)(model.forward)  # type: ignore[method-assign]
    inside = torch.export.export(model, (X,), strict=strict)
    assert inside.module()(X).dtype is BF16


def test_a_decorated_function_that_calls_itself() -> None:
    """Each level enters its own region in the graph; one object entered twice could not be."""

    class Block(torch.nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.inner = Block(depth - 1) if depth else torch.nn.Identity()

        @amphal.autocast("cpu", BF16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) @ x

    block = Block(2)
    assert torch.compile(block, fullgraph=True, backend="eager")(X).dtype is BF16
    for strict in (True, False):
        assert torch.export.export(block, (X,), strict=strict).module()(X).dtype is BF16
