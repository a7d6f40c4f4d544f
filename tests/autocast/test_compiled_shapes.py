"""Regions in code that Dynamo must break: the same dtypes, values, graphs and state as torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import amphal

M = torch.nn.Linear(4, 4)
X = torch.randn(2, 4)
Make = Callable[[], Any]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Nothing compiled before, nothing on afterwards."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


def a_loop(x: torch.Tensor, region: Make) -> torch.Tensor:
    with region():
        for _ in range(2):
            y = M(x)
            print(end="")
    return y


def under_try(x: torch.Tensor, region: Make) -> torch.Tensor:
    try:
        with region():
            y = M(x)
            print(end="")
            return y
    finally:
        print(end="")


def an_exit_stack(x: torch.Tensor, region: Make) -> torch.Tensor:
    with contextlib.ExitStack() as stack:
        stack.enter_context(region())
        return M(x)


def a_generator(x: torch.Tensor, region: Make) -> torch.Tensor:
    def rows() -> Iterator[torch.Tensor]:
        with region():
            for row in x:
                yield M(row)

    return torch.stack(list(rows()))


def a_nested_function(x: torch.Tensor, region: Make) -> torch.Tensor:
    def inner(value: torch.Tensor) -> torch.Tensor:
        with region():
            print(end="")
            return M(value)

    return inner(x) + inner(x)


def a_branch_on_data(x: torch.Tensor, region: Make) -> torch.Tensor:
    with region():
        y = M(x)
        y = y + 1 if y.sum().item() > 1e9 else y - 1
        return M(y)


def a_caught_exception(x: torch.Tensor, region: Make) -> torch.Tensor:
    try:
        with region():
            print(end="")
            raise KeyError
    except KeyError:
        return M(x)


def nested_regions(x: torch.Tensor, region: Make) -> torch.Tensor:
    with region():
        for _ in range(2):
            with region():
                y = M(x)
                print(end="")
        return M(y)


def made_before(x: torch.Tensor, region: Make) -> torch.Tensor:
    made = region()
    with made:
        print(end="")
        return M(x)


SHAPES = [
    a_loop,
    under_try,
    an_exit_stack,
    a_generator,
    a_nested_function,
    a_branch_on_data,
    a_caught_exception,
    nested_regions,
    made_before,
]
PLAN = amphal.detect("cpu", precision="bf16")
OUTSIDE = amphal.autocast("cpu", "bf16")
REGIONS: dict[str, Make] = {
    "amphal": lambda: amphal.autocast("cpu", "bf16"),
    "plan": lambda: PLAN.autocast(),
    "outside": lambda: OUTSIDE,
    "ops": lambda: amphal.autocast("cpu", "bf16", ops={"softmax": "fp32"}),
}


ROWS = [
    pytest.param(shape, kind, id=f"{shape.__name__}-{kind}")
    for shape in SHAPES
    for kind in REGIONS
    # Dynamo cannot break a graph while one object is entered twice, whoever made it.
    if (shape, kind) != (nested_regions, "outside")
]


def run(shape: Callable[..., torch.Tensor], region: Make, backend: Any) -> tuple[Any, int]:
    """The result of a compiled shape, and how many graphs it took."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(shape, backend=counter)(X, region), counter.frame_count


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("shape", "kind"), ROWS)
def test_a_shape_runs_as_with_torchs_region(
    shape: Callable[..., torch.Tensor], kind: str, backend: str
) -> None:
    """Same dtype and bits as in eager mode, and not more graphs than torch's own region takes."""
    import torch._dynamo.testing

    eager = shape(X, REGIONS[kind])
    torchs, graphs = run(shape, lambda: torch.autocast("cpu", torch.bfloat16), backend)
    found, mine = run(shape, REGIONS[kind], backend)
    assert found.dtype is eager.dtype is torchs.dtype
    assert torch.equal(found, eager)
    if kind != "ops":  # each op of such a region is bracketed by calls in the graph
        assert mine <= graphs


@pytest.mark.parametrize("kind", REGIONS)
def test_the_users_exception_is_the_users(kind: str) -> None:
    """An exception raised in a region arrives, and the region is over."""

    def raises(x: torch.Tensor) -> torch.Tensor:
        with REGIONS[kind]():
            y = M(x)
            raise ValueError("the user's")
        return y

    with pytest.raises(ValueError, match="the user's"):
        torch.compile(raises, backend="eager")(X)


def test_fullgraph_is_one_graph() -> None:
    """What keeps Dynamo out of amphal's frames does not keep it from tracing through them."""

    @torch.compile(backend="eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        with amphal.autocast("cpu", "bf16"):
            y = M(x)
            with amphal.autocast("cpu", enabled=False):
                return M(y.float())

    assert step(X).dtype is torch.float32
