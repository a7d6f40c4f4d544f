"""``x * 2.0`` in this thread while a region of another thread names ``mul`` in ``ops=``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import amphal

ARITHMETIC = ["add", "sub", "mul", "div"]


@pytest.fixture(autouse=True)
def _region_elsewhere() -> Iterator[None]:
    """Another thread is in a region that names arithmetic ops."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        ops = dict.fromkeys(ARITHMETIC, "fp32") | {"multiply": "fp32", "true_divide": "fp32"}
        with amphal.autocast("cpu", "bf16", ops=ops):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(60)
    yield
    leave.set()
    thread.join()


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mul": lambda x: x * 2.0,
    "mul by an int": lambda x: x * 2,
    "number first": lambda x: 2.0 * x,
    "number first, sub": lambda x: 1 - x,
    "add": lambda x: x + 1,
    "add with alpha": lambda x: torch.add(x, 1, alpha=3),
    "sub": lambda x: x - 0.5,
    "div": lambda x: x / 3,
    "div with rounding": lambda x: torch.div(x, 0.25, rounding_mode="floor"),
    "in place": lambda x: x.clone().mul_(2.0).add_(1),
    "multiply": lambda x: torch.multiply(x, 2.0),
    "true_divide": lambda x: torch.true_divide(x, 3),
    "two tensors": lambda x: x * x + x,
    "no dimension": lambda x: x.sum() * 2.0,
}


@pytest.mark.parametrize("ops", [None, {"softmax": "fp32"}], ids=["plain", "ops"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_numbers_go_through(
    call: Callable[[Tensor], Tensor], dtype: torch.dtype, ops: dict[str, str] | None
) -> None:
    """Value and dtype as outside of all regions; gradients too."""
    x = torch.linspace(-2, 2, 7, dtype=dtype, requires_grad=True)
    expected = call(x)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    with amphal.autocast("cpu", "bf16", ops=ops):
        result = call(x)
        (grad,) = torch.autograd.grad(result.square().sum(), x)
    assert result.dtype is expected.dtype
    assert torch.equal(result, expected)
    assert torch.equal(grad, expected_grad)


def test_a_name_for_another_op_is_made_of_it() -> None:
    """``torch.multiply`` with a number is a ``mul``, whose policy holds."""
    x = torch.ones(3)
    with amphal.autocast("cpu", "bf16", ops={"mul": "lower_precision"}):
        assert torch.multiply(x, 2.0).dtype is torch.bfloat16
