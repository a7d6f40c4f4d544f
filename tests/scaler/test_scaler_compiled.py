"""The scaler in compiled code: torch's number of graphs, the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import amphal

Step = Callable[[Any, nn.Module, Any, torch.Tensor], None]


@pytest.fixture(autouse=True)
def _no_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def whole(s: Any, m: nn.Module, o: Any, x: torch.Tensor) -> None:
    o.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = m(x).float().square().mean()
    s.scale(loss).backward()
    s.step(o)
    s.update()


def unscaling(s: Any, m: nn.Module, o: Any, x: torch.Tensor) -> None:
    o.zero_grad()
    s.scale(m(x).square().mean()).backward()
    s.unscale_(o)
    nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    s.step(o)
    s.update()


def accumulating(s: Any, m: nn.Module, o: Any, x: torch.Tensor) -> None:
    o.zero_grad()
    for part in x.chunk(2):
        s.scale(m(part).square().mean() / 2).backward()
    s.step(o)
    s.update()


def run(make: Callable[[], Any], step: Step, *, compiled: bool) -> tuple[int, torch.Tensor, float]:
    """The number of graphs after 12 steps, the weights, the scale."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, counter = make(), CompileCounter()
    call = torch.compile(step, backend=counter) if compiled else step
    for i in range(12):
        call(scaler, model, optimizer, torch.full((4, 8), 0.1 * (i + 1)))
    return counter.frame_count, model.weight.detach().clone(), scaler.get_scale()


@pytest.mark.parametrize("step", [whole, unscaling, accumulating])
def test_as_few_graphs_as_torch_and_the_same_weights(step: Step) -> None:
    """No graph of the scaler's own, none again later; eager mode gives the same weights."""
    graphs, weight, scale = run(lambda: amphal.GradScaler("cpu", enabled=True), step, compiled=True)
    torchs, torch_weight, torch_scale = run(
        lambda: torch.amp.GradScaler("cpu"), step, compiled=True
    )
    _, eager, _ = run(lambda: amphal.GradScaler("cpu", enabled=True), step, compiled=False)
    assert graphs <= torchs
    assert scale == torch_scale
    torch.testing.assert_close(weight, torch_weight)
    torch.testing.assert_close(weight, eager)


def test_a_full_graph_is_refused_at_once() -> None:
    """As torch's scaler: the first call says that the scaler's methods are not traced."""
    scaler = amphal.GradScaler("cpu", enabled=True)
    loss = torch.compile(lambda x: scaler.scale(x.sum()), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="counts on the host"):
        loss(torch.ones(2, requires_grad=True))
