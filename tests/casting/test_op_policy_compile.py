"""``amphal.autocast(ops=...)`` under ``torch.compile(fullgraph=True)`` and ``torch.export``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn

import amphal
from amphal import op_lists
from amphal._casting import installed as _registration
from amphal._casting import policy as _policy
from amphal._torch import private

pytestmark = pytest.mark.filterwarnings("ignore")

TARGET = torch.tensor([0, 1, 2, 3])
WEIGHT = torch.randn(8, 8)
POLICIES: list[dict[str, str]] = [
    {},
    {"softmax": "fp32"},
    {"softmax": "lower_precision", "linear": "fp32"},
    {"mse_loss": "lower_precision", "cross_entropy_loss": "lower_precision"},
]
BACKENDS = ["eager", "aot_eager", "inductor"]

Inputs = tuple[torch.Tensor, torch.Tensor]


def work(x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return F.softmax(b, -1), F.linear(x, WEIGHT), F.mse_loss(x, x + 1), F.cross_entropy(b, TARGET)


def dtypes(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for t in tensors)


def region(ops: Any) -> Any:
    return amphal.autocast("cpu", dtype=torch.bfloat16, ops=ops)


@pytest.fixture
def inputs() -> Iterator[Inputs]:
    torch._dynamo.reset()
    x = torch.randn(4, 8)
    yield x, x.bfloat16()
    torch._dynamo.reset()
    assert _policy.active() is None
    # A compiler's threads keep kernels there, which nobody holds.
    assert not _registration.temporary_names("AutocastCPU", held=True)


def expected(inputs: Inputs) -> list[tuple[torch.dtype, ...]]:
    found = []
    for ops in POLICIES:
        with region(ops):
            found.append(dtypes(work(*inputs)))
    assert len(set(found)) == len(POLICIES)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_region_around_a_compiled_function(backend: str, inputs: Inputs) -> None:
    """Each policy gives its own dtypes, in any order, with one graph for each policy."""
    want = expected(inputs)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(work, backend=counter, fullgraph=True)
    for i in (0, 1, 2, 3, 2, 1, 0, 3, 0):
        with region(POLICIES[i]):
            assert dtypes(compiled(*inputs)) == want[i]
    assert dtypes(compiled(*inputs)) == dtypes(work(*inputs))
    assert counter.frame_count <= len(POLICIES) + 1


def constructed(ops: dict[str, str]) -> Callable[..., Any]:
    def inside(x: torch.Tensor, b: torch.Tensor) -> Any:
        with amphal.autocast("cpu", dtype="bf16", ops=ops):
            return work(x, b)

    return inside


def from_outside(ops: dict[str, str]) -> Callable[..., Any]:
    made = region(ops)

    def inside(x: torch.Tensor, b: torch.Tensor) -> Any:
        with made:
            return work(x, b)

    return inside


def decorated(ops: dict[str, str]) -> Callable[..., Any]:
    return region(ops)(work)


@pytest.mark.parametrize("make", [constructed, from_outside, decorated])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_region_inside_a_compiled_function(
    backend: str, make: Callable[..., Any], inputs: Inputs
) -> None:
    """A region that is made inside, made outside, or decorates keeps its policy in the graph."""
    want = expected(inputs)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    made = [torch.compile(make(ops), backend=counter, fullgraph=True) for ops in POLICIES]
    for i in (1, 2, 3, 1):
        assert dtypes(made[i](*inputs)) == want[i]
        with region(POLICIES[1]):
            assert dtypes(made[2](*inputs)) == want[2]
    assert counter.frame_count <= 2 * len(POLICIES)


def test_regions_inside_and_outside_nest(inputs: Inputs) -> None:
    """The inner region is the graph's, the outer one the caller's; ops of both are cast."""
    inner = constructed({"linear": "fp32"})
    compiled = torch.compile(inner, backend="aot_eager", fullgraph=True)
    for ops in ({"softmax": "fp32"}, {"softmax": "as_is"}, {"softmax": "fp32"}):
        with region(ops):
            assert dtypes(compiled(*inputs)) == dtypes(inner(*inputs))


def test_whole_lists_compile(inputs: Inputs) -> None:
    """CUDA's lists around a compiled function cast as they do without compiling."""
    compiled = torch.compile(work, backend="aot_eager", fullgraph=True)
    with region(op_lists("cuda")):
        assert dtypes(compiled(*inputs)) == dtypes(work(*inputs))
    assert dtypes(compiled(*inputs)) == dtypes(work(*inputs))


def test_gradients_of_a_compiled_function(inputs: Inputs) -> None:
    """Forward and backward of the graph equal those of eager code."""

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with region({"linear": "fp32", "softmax": "lower_precision"}):
            return F.softmax(F.linear(x, w), -1).float().square().sum()

    grads = []
    for f in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        w = WEIGHT.clone().requires_grad_()
        f(inputs[0], w).backward()
        grads.append(w.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_a_trace_that_fails_leaves_nothing(inputs: Inputs) -> None:
    """When Dynamo gives up inside a region, the thread and the dispatcher are as before."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        with region({"softmax": "fp32"}):
            torch._dynamo.graph_break()
            return F.softmax(x, -1)

    for f in (broken, from_outside({"softmax": "fp32"})):
        compiled = torch.compile(f, backend="eager", fullgraph=True)
        with pytest.raises(Exception):  # noqa: B017 - what Dynamo raises differs by version
            compiled(*([object()] if f is not broken else [inputs[1]]))
        assert _policy.active() is None
        assert not torch.is_autocast_enabled("cpu")


class Model(nn.Module):
    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.ops = ops

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with amphal.autocast("cpu", dtype="bf16", ops=self.ops):
            h = self.linear(x)
            loss = F.cross_entropy(h, TARGET)
            return h, F.softmax(h, -1), self.norm(h), loss, F.instance_norm(h[:, None])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "ops",
    [
        {"softmax": "fp32", "layer_norm": "fp32"},
        {"linear": "fp32", "layer_norm": "lower_precision", "batch_norm": "lower_precision"},
        {"cross_entropy_loss": "lower_precision", "softmax": "as_is"},
    ],
)
def test_export_keeps_a_policy(ops: dict[str, str], strict: bool, inputs: Inputs) -> None:
    """The exported program gives the module's dtypes and values, in a plain and in a CPU region."""
    model = Model(ops).eval()
    program = torch.export.export(model, (inputs[0],), strict=strict)
    for got, want in zip(program.module()(inputs[0]), model(inputs[0]), strict=True):
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dtypes(program.module()(inputs[0])) == dtypes(model(inputs[0]))


def test_an_exported_program_needs_no_amphal(inputs: Inputs) -> None:
    """Its casts are ops of the graph: no call of amphal is in it."""
    program = torch.export.export(Model({"softmax": "fp32"}).eval(), (inputs[0],))
    targets = {
        node.target
        for module in program.graph_module.modules()
        for node in getattr(module, "graph", torch.fx.Graph()).nodes
        if node.op == "call_function"
    }
    assert torch.ops.aten._to_copy.default in targets
    assert not [t for t in targets if "amphal" in str(getattr(t, "__module__", ""))]


OFF = amphal.autocast("cpu", enabled=False)
INNER: dict[str, Callable[[], Any]] = {
    "off": lambda: amphal.autocast("cpu", enabled=False),
    "torch off": lambda: torch.autocast("cpu", enabled=False),
    "float32": lambda: amphal.autocast("cpu", dtype="fp32"),
    "bf16": lambda: amphal.autocast("cpu", dtype="bf16"),
}


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "graph break"])
@pytest.mark.parametrize("inlined", [False, True], ids=["direct", "in a function"])
@pytest.mark.parametrize("inner", [*INNER, "made outside", "ops"])
def test_a_region_inside_one_that_is_entered_in_a_graph_is_refused(
    inner: str, inlined: bool, breaks: bool
) -> None:
    """Dynamo would let the outer one override it; no region is left open.

    After a graph break Dynamo may leave the outer one on the stack of function modes, where it does
    nothing in eager code.
    """
    torch.compiler.reset()
    made, other = region({"softmax": "fp32"}), region({"mm": "fp32"})
    make = INNER.get(inner, lambda: OFF if inner == "made outside" else other)

    def part(x: torch.Tensor) -> torch.Tensor:
        with make():
            if breaks:
                torch._dynamo.graph_break()
            return torch.mm(x, x)

    def direct(x: torch.Tensor) -> torch.Tensor:
        with made, make():
            if breaks:
                torch._dynamo.graph_break()
            return torch.mm(x, x)

    def in_function(x: torch.Tensor) -> torch.Tensor:
        with made:
            return part(x)

    compiled = torch.compile(in_function if inlined else direct, backend="eager")
    try:
        with pytest.raises(Exception, match="has another region inside"):
            compiled(torch.ones(2, 2))
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
    finally:
        for mode in (made, other):
            private.take_mode_off(mode)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_regions_around_and_beside_one_that_is_entered_in_a_graph() -> None:
    """Only a region inside is refused: one around it and ones before and after it are right."""
    torch.compiler.reset()
    made = region({"mm": "fp32"})

    @torch.compile(backend="eager", fullgraph=True)
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with amphal.autocast("cpu", dtype="bf16"):
            with OFF:
                off = torch.mm(x, x)
            with made:
                own = torch.mm(x, x), torch.bmm(x[None], x[None])
            return off, *own, torch.mm(x, x)

    found = [t.dtype for t in f(torch.ones(2, 2))]
    assert found == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
