"""custom_fwd and custom_bwd: the device comes from the inputs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import amphal
from amphal.errors import (
    ArgumentError,
    ArgumentTypeError,
    AutocastStateError,
    UnsupportedPrecisionError,
)
from amphal.testing import simulate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _named_dtypes_may_be_slow_here() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        yield
    assert not torch.is_autocast_enabled("cpu")


seen: list[Any] = []


class Follow(torch.autograd.Function):
    """Computes in the ambient state."""

    @staticmethod
    @amphal.custom_fwd
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @amphal.custom_bwd
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return grad @ w.t(), x.t() @ grad


class Protect(torch.autograd.Function):
    """Computes in fp32 whatever comes in, containers included."""

    @staticmethod
    @amphal.custom_fwd(cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, scale: float, more: Any = None) -> torch.Tensor:
        seen.append((x.dtype, torch.is_autocast_enabled("cpu"), more))
        return (x @ x) * scale

    @staticmethod
    @amphal.custom_bwd
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return grad, None, None


@pytest.fixture(autouse=True)
def _forget() -> None:
    seen.clear()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_backward_runs_in_forwards_state(dtype: torch.dtype) -> None:
    """After the region was left, backward still computes in its dtype: bf16 stays bf16."""
    x = torch.ones(2, 2, requires_grad=True)
    w = torch.ones(2, 2, requires_grad=True)
    with amphal.autocast("cpu", dtype):
        y = Follow.apply(x, w)
    assert y.dtype is dtype
    y.float().sum().backward()
    assert seen == [(True, dtype)]
    assert x.grad is not None
    assert x.grad.dtype is FP32


def test_inputs_are_cast_and_autocast_is_off_inside() -> None:
    """fp32 protection works under the autocast of whatever device the inputs are on."""
    x = torch.ones(2, 2, dtype=BF16, requires_grad=True)
    half = torch.ones(1, dtype=FP16)
    double = torch.ones(1, dtype=torch.float64)
    ints = torch.ones(1, dtype=torch.int64)
    with amphal.autocast("cpu", BF16):
        y = Protect.apply(x, 2.0, {"a": [half, double], "b": (ints, "text", None)})
    dtype, on, more = seen[0]
    assert (dtype, on, y.dtype) == (FP32, False, FP32)
    assert more["a"][0].dtype is FP32
    assert more["a"][1].dtype is torch.float64
    assert more["b"][0].dtype is torch.int64
    assert more["b"][1:] == ("text", None)
    with amphal.autocast("cpu", FP16):
        y.sum().backward()
    assert seen[-1] is False


def test_outside_a_region_nothing_happens() -> None:
    """cast_inputs has no effect where autocast is off, as in torch."""
    x = torch.ones(2, 2, dtype=BF16)
    assert Protect.apply(x, 1.0).dtype is BF16


def test_fake_tensors_of_another_device_follow_that_device() -> None:
    """A function decorated for cuda only lost its protection elsewhere; here the inputs decide."""
    with simulate(amphal.Hardware("xpu", "Max 1550", flags=frozenset({"has_fp16"}))):
        with torch._subclasses.FakeTensorMode(), torch.no_grad():
            x = torch.empty(2, 2, device="xpu", dtype=FP16)
            with amphal.autocast("xpu", FP16):
                assert Protect.apply(x, 1.0).dtype is FP32


def test_pairs_with_torchs_own_decorators() -> None:
    """Either half may be torch's: both leave what the other reads."""

    class Mixed(torch.autograd.Function):
        @staticmethod
        @amphal.custom_fwd
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_autocast_dtype("cpu"))
            return grad

    class Other(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x @ x

        @staticmethod
        @amphal.custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
            return grad

    for function in (Mixed, Other):
        x = torch.ones(2, 2, requires_grad=True)
        with amphal.autocast("cpu", FP16):
            y = function.apply(x)
        y.float().sum().backward()
    assert seen == [FP16, FP16]


def test_backward_without_a_decorated_forward_is_named() -> None:
    """The error says which decorator is missing."""

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        @amphal.custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    with pytest.raises(AutocastStateError, match="custom_fwd"):
        Half.apply(torch.ones(1, requires_grad=True)).backward()


def test_wrong_arguments() -> None:
    """What is no device, dtype or function is refused where it is written."""
    with pytest.raises(ArgumentTypeError, match="decorates a function"):
        amphal.custom_fwd(3)  # type: ignore[call-overload]
    with pytest.raises(ArgumentTypeError, match="decorates a function"):
        amphal.custom_bwd(3)  # type: ignore[call-overload]
    with pytest.raises(UnsupportedPrecisionError, match="int8"):
        amphal.custom_fwd(cast_inputs=torch.int8)
    with pytest.raises(ArgumentError, match="nodevice"):
        amphal.custom_fwd(device_type="nodevice")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles(backend: str) -> None:
    """A decorated Function inside a compiled function, forward and backward."""
    torch._dynamo.reset()

    def run(x: torch.Tensor) -> torch.Tensor:
        with amphal.autocast("cpu", BF16):
            return Protect.apply(x, 1.0).sum()

    x = torch.ones(2, 2, requires_grad=True)
    y = torch.compile(run, backend=backend)(x)
    assert y.dtype is FP32
    y.backward()
    assert x.grad is not None


def test_a_forward_without_ctx() -> None:
    """With setup_context there is no ctx in forward: inputs are cast all the same."""

    class Modern(torch.autograd.Function):
        @staticmethod
        @amphal.custom_fwd(cast_inputs=torch.float32)
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x @ x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        @amphal.custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    x = torch.ones(2, 2, requires_grad=True)
    with amphal.autocast("cpu", BF16):
        y = Modern.apply(x)
    assert y.dtype is FP32
    assert not hasattr(x, "_amphal_autocast")
    with pytest.raises(AutocastStateError, match="setup_context"):
        y.sum().backward()


class Exp(torch.autograd.Function):
    """In the form that torch.func needs: its forward has no ctx."""

    generate_vmap_rule = True

    @staticmethod
    @amphal.custom_fwd(cast_inputs="fp32")
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @staticmethod
    @amphal.custom_fwd
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    @amphal.custom_bwd
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        seen.append((torch.is_autocast_enabled("cpu"), y.dtype))
        return grad * y


class Times(torch.autograd.Function):
    """The same form, in the ambient state; its forward calls another such function."""

    generate_vmap_rule = True

    @staticmethod
    @amphal.custom_fwd
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        Exp.apply(x)
        return x @ w

    @staticmethod
    @amphal.custom_fwd
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @amphal.custom_bwd
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return grad @ w.t(), x.t() @ grad


def test_setup_context_keeps_forwards_state() -> None:
    """backward runs as forward did: off after cast_inputs, in bf16 without, region left or not."""
    x = torch.zeros(2, 2, dtype=BF16, requires_grad=True)
    with amphal.autocast("cpu", BF16):
        y = Exp.apply(x)
        assert y.dtype is FP32
        y.sum().backward()
    assert seen == [(False, FP32)]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(2, 2, dtype=BF16))
    seen.clear()
    x, w = torch.ones(2, 2, requires_grad=True), torch.eye(2, requires_grad=True)
    with amphal.autocast("cpu", BF16):
        y = Times.apply(x, w)
    assert y.dtype is BF16
    y.float().sum().backward()
    assert seen == [(True, BF16)]
    assert x.grad is not None
    assert w.grad is not None
    assert torch.equal(x.grad, torch.ones(2, 2))
    assert torch.equal(w.grad, torch.full((2, 2), 2.0))


def test_setup_context_in_vmap() -> None:
    """Without a backward pass: the value."""
    with amphal.autocast("cpu", BF16):
        found = torch.func.vmap(lambda t: Exp.apply(t).sum())(torch.zeros(3, dtype=BF16))
    assert torch.equal(found, torch.ones(3))


@pytest.mark.parametrize("transform", ["grad", "vmap_grad", "jacrev"])
def test_setup_context_in_torch_func(transform: str) -> None:
    """The same under the transforms: the slope of exp at 0 is 1, with autocast off in backward."""
    x = torch.zeros(3, dtype=BF16)

    def f(t: torch.Tensor) -> torch.Tensor:
        return Exp.apply(t).sum()

    with amphal.autocast("cpu", BF16):
        if transform == "vmap_grad":
            found = torch.func.vmap(torch.func.grad(f))(x)
        else:
            found = getattr(torch.func, transform)(f)(x)
    assert torch.equal(found, torch.ones(3, dtype=BF16))
    assert seen == [(False, FP32)]


def test_cast_inputs_on_setup_context_is_refused() -> None:
    """The inputs are cast in forward; the error says so."""
    with pytest.raises(ArgumentError, match="belongs to forward"):

        @amphal.custom_fwd(cast_inputs="fp32")
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...
