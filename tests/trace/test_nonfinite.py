"""``amphal.find_nonfinite``: the op of the first NaN or infinity, and a line that cures it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amphal
from amphal.errors import ArgumentTypeError


def region() -> torch.autocast:
    """The region of all cases: fp16, whose largest value is 65504."""
    return torch.autocast("cpu", torch.float16)


class Attention(nn.Module):
    """Logits beyond 65504: queries and keys are scaled after the product instead of before."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.bmm(self.q(x) * 200, (self.k(x) * 200).transpose(1, 2))  # here: bmm
        return torch.softmax(scores / 1e6, -1)


class LogOfZero(nn.Module):
    """A rectified value is exactly zero somewhere, and its logarithm is not finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.relu(x))  # here: log


class Square(nn.Module):
    """A norm by hand: the square overflows, the root would not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = F.linear(x, torch.eye(x.shape[-1]) * 400)
        return (half * half).float().sum(-1).sqrt()  # here: mul


class Sum(nn.Module):
    """A sum over many values in fp16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, torch.eye(x.shape[-1]) * 1000)
        return y.abs().sum((0, 1, 2))  # here: sum


class Exponent(nn.Module):
    """A softmax by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, torch.eye(x.shape[-1]) * 30)
        e = torch.exp(y)  # here: exp
        return e / e.sum(-1, keepdim=True)


class Backward(nn.Module):
    """The forward pass is finite; the derivative of a root at zero is infinite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(torch.relu(x))  # here: div


class Division(nn.Module):
    """An epsilon that is zero in fp16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(x, torch.zeros(8, 8))
        return x.half() / (low + torch.tensor(1e-8, dtype=torch.float16))  # here: div


class Cast(nn.Module):
    """A finite value that is too large for the dtype it is cast to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x * 1e6, torch.eye(8))  # here: _to_copy


class Variance(nn.Module):
    """A variance by the difference of means, below zero, under a root."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt((x - x) - 1e-3)  # here: sqrt


class Deep(nn.Module):
    """The fault is in a child of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), LogOfZero()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


MODELS = [Attention, LogOfZero, Square, Sum, Exponent, Backward, Division, Cast, Variance, Deep]


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Forward and backward of one iteration."""

    def step() -> None:
        with region():
            out = model(x)
        out.float().sum().backward()

    return step


def example() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 16, 8).requires_grad_()


@pytest.mark.parametrize("kind", MODELS)
def test_the_first_bad_op_is_located(kind: type[nn.Module]) -> None:
    """At its line, in its module, with inputs that are finite."""
    import inspect

    torch.manual_seed(0)
    model = kind()
    found = amphal.find_nonfinite(step_of(model, example()))
    assert found is not None
    source = LogOfZero if kind is Deep else kind
    lines, start = inspect.getsourcelines(source.forward)
    at = next(i for i, line in enumerate(lines) if "# here:" in line)
    assert found.line.endswith(f"test_nonfinite.py:{start + at}")
    assert found.aten == lines[at].rpartition("# here: ")[2].strip()
    assert found.phase == ("backward" if kind is Backward else "forward")
    assert all(math.isfinite(i["largest"]) and not i["nan"] for i in found.inputs)
    assert found.module == ("Deep.body.1.1" if kind is Deep else kind.__name__)
    assert found.line in str(found)


def test_a_finite_step_has_none_and_a_mask_is_meant() -> None:
    """An infinity that the step writes itself is no finding."""

    def step() -> None:
        with region():
            x = F.linear(torch.ones(2, 4), torch.eye(4))
            mask = torch.full((4,), -math.inf)
            mask[0] = 0
            torch.softmax(x.float() + mask, -1).sum()

    assert amphal.find_nonfinite(step) is None


def test_a_row_that_is_masked_whole_is_found() -> None:
    """The softmax of nothing but minus infinity is NaN."""

    def step() -> None:
        torch.softmax(torch.full((2, 4), -math.inf), -1)

    found = amphal.find_nonfinite(step)
    assert found is not None
    assert (found.kind, found.aten) == ("nan", "_softmax")
    assert "all finite" not in str(found)


class Block(nn.Module):
    """Attention logits that overflow in fp16, in a child that can be pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.out = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.attention(x))


def test_a_cure_is_run_before_it_is_proposed() -> None:
    """After each line that is proposed the step is finite, and the model is as it was."""
    torch.manual_seed(0)
    model, x = Block(), example()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = amphal.find_nonfinite(step_of(model, x), model)
    assert found is not None
    assert 'amphal.set_precision(model, "fp32", names="attention")' in found.cures
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    amphal.set_precision(model, "fp32", names="attention")
    assert amphal.find_nonfinite(step_of(model, x)) is None


def test_what_does_not_cure_is_said() -> None:
    """The logarithm of zero is not finite in any precision."""
    model = Deep()
    found = amphal.find_nonfinite(step_of(model, example()), model)
    assert found is not None
    assert not found.cures
    assert len(found.tried) == 3
    assert "none of these cures it" in str(found)


def test_nothing_is_left_behind() -> None:
    """Hooks, modes, autocast and random state are as before, also after a step that raises."""
    hooks = torch.nn.modules.module._global_forward_hooks
    random = torch.get_rng_state()

    def step() -> None:
        torch.rand(3)
        with region():
            raise KeyError("in the step")

    with pytest.raises(KeyError, match="in the step"):
        amphal.find_nonfinite(step)
    assert not hooks
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(random, torch.get_rng_state())
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32


@pytest.mark.parametrize(("step", "model"), [(3, None), (lambda: None, 3)])
def test_wrong_arguments_are_refused(step: object, model: object) -> None:
    """The message says what was given."""
    with pytest.raises(ArgumentTypeError, match="got 3"):
        amphal.find_nonfinite(step, model)  # type: ignore[arg-type]
