"""Errors in compiled graphs leave nothing of a region behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import amphal
from amphal._autocast import region as regions
from amphal._casting import installed, policy

OPS = {"softmax": "as_is", "linear": "as_is"}
M = torch.nn.Linear(4, 4)
X = torch.rand(3, 4)


def left() -> tuple[Any, ...]:
    """All that a region could leave behind, but for torch's count of nesting."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        len(regions._thread.stack),
        len(regions._thread.in_graph),
        policy.active() is None,
        installed.temporary_names("AutocastCPU", held=True),
    )


def test_an_error_in_a_graph_is_healed_by_the_next_region() -> None:
    """A bad index at run time: the next plain region computes by the device's own lists."""

    def f(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        with amphal.autocast("cpu", "bf16", ops=OPS):
            return torch.softmax(M(x), -1)[torch.arange(3), i]

    torch._dynamo.reset()
    before = left()
    compiled = torch.compile(f, backend="eager", fullgraph=True)
    good = torch.zeros(3, dtype=torch.long)
    want = compiled(X, good)
    assert left() == before
    for _ in range(2):
        with pytest.raises(IndexError):
            compiled(X, torch.full((3,), 9))
    with torch.autocast("cpu", torch.bfloat16):
        with amphal.autocast("cpu", "bf16"):
            assert M(X).dtype is torch.bfloat16
        assert M(X).dtype is torch.bfloat16  # torch's region around it is still on
    assert left() == before
    assert torch.equal(compiled(X, good), want)
    assert left() == before
    torch._dynamo.reset()
    while torch.autocast_decrement_nesting() > 0:  # torch's own leaks in a failed graph
        pass


def test_nested_regions_in_a_graph_are_not_taken_for_leaked() -> None:
    """A policy inside a policy in one graph: both are in force, as in eager mode."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with amphal.autocast("cpu", "bf16", ops={"linear": "as_is"}):
            with amphal.autocast("cpu", "bf16", ops={"mm": "fp32"}):
                inner = torch.mm(M(x), M.weight)
            return inner, torch.mm(x, M.weight)

    torch._dynamo.reset()
    before = left()
    found = torch.compile(f, backend="eager", fullgraph=True)(X)
    assert [t.dtype for t in found] == [t.dtype for t in f(X)] == [torch.float32, torch.bfloat16]
    assert left() == before
