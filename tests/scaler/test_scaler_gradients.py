"""Every kind of gradient, and every kind of device, that a scaler meets."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.scaler import iterate, problem, scaler_of
from torch.utils._python_dispatch import TorchDispatchMode

import amphal
from amphal._scaler import gradients as _grads
from amphal._scaler.vendor import VendorScaler
from amphal.contract import DtypeSupport, ScalerSupport, get_backend
from amphal.contract import registry as _registry
from amphal.errors import ArgumentError, BackendError, StateDictError

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize(
    ("dtype", "fused"),
    # torch's fused optimizers take no complex parameters.
    [(d, fused) for d in DTYPES for fused in (False, True) if not (d.is_complex and fused)],
)
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_dtypes(dtype: torch.dtype, fused: bool, bad: float | None, memory: str) -> None:
    """The step is the one without a scaler; what is not finite skips, in either part if complex."""
    param, twin = (torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    optimizer, reference = (torch.optim.SGD([p], lr=0.5, fused=fused) for p in (param, twin))
    grad = torch.tensor([1.0, 2.0, -0.5]).to(dtype)
    if dtype.is_complex:
        grad = grad * (1 + 2j)
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    param.grad, twin.grad = grad * 65536, grad.clone()
    if bad is not None:
        param.grad[1] = torch.tensor(complex(0.0, bad) if dtype.is_complex else bad)
    scaler.step(optimizer)
    scaler.update()
    if bad is None:
        reference.step()
        assert torch.equal(param.grad, grad)
    assert torch.equal(param, twin)
    assert scaler.outcome(optimizer).skipped is (bad is not None)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("call", ["unscale_", "step", "clip_grad_norm_"])
@pytest.mark.parametrize("named", [False, True])
def test_float16_parameters_are_named(fused: bool, call: str, named: bool) -> None:
    """The error tells which parameters are float16 and what to do, fused or not."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1).half())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    scaler = scaler_of(model=net if named else None)
    scaler.scale(torch.ones(()))
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    words = r"float16.*: 1\.weight, 1\.bias\." if named else r"group 0, param 2, shape \(1, 2\)"
    with pytest.raises(ValueError, match=words) as caught:
        getattr(scaler, call)(*((optimizer, 1.0) if call.startswith("clip") else (optimizer,)))
    assert isinstance(caught.value, amphal.AmphalError)
    assert all(p.grad is not None and p.grad.eq(1).all() for p in net.parameters())


@pytest.mark.parametrize("bad", [False, True])
def test_sparse_gradients(bad: bool) -> None:
    """Values of sparse gradients are unscaled and checked, duplicates and all."""
    table = torch.nn.Embedding(5, 2, sparse=True)
    twin = torch.nn.Embedding(5, 2, sparse=True)
    twin.load_state_dict(table.state_dict())
    scaler = scaler_of()
    optimizers = [torch.optim.SparseAdam(list(t.parameters()), lr=0.1) for t in (table, twin)]
    rows = torch.tensor([1, 1, 4])
    scaler.scale(table(rows).sum() * (math.inf if bad else 1.0)).backward()
    twin(rows).sum().backward()
    scaler.step(optimizers[0])
    scaler.update()
    if not bad:
        optimizers[1].step()
    assert torch.equal(table.weight, twin.weight)
    assert scaler.outcome(optimizers[0]).skipped is bad


def test_mixed_groups_and_frozen_parameters() -> None:
    """float32, bfloat16, sparse, frozen and unused parameters in one optimizer."""
    params = [
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(0)),
    ]
    optimizer = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=1.0)
    scaler = scaler_of()
    for bad in (False, True):
        loss = params[0].sum() + params[1].float().sum() * (math.nan if bad else 1.0)
        scaler.scale(loss + params[4].sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.outcome(optimizer).skipped is bad
        optimizer.zero_grad()
    assert [p.sum().item() for p in params] == [0.0, 0.0, 2.0, 2.0, 0.0]


def test_a_scalar_loss_of_low_precision_becomes_float32() -> None:
    """A float16 loss times the scale would overflow in float16."""
    loss = torch.tensor(3.0, dtype=torch.float16)
    assert scaler_of().scale(loss).dtype is torch.float32


class Float64(TorchDispatchMode):
    """Fails on any tensor of float64, as a device without it would."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(value, torch.Tensor):
                assert value.dtype is not torch.float64, func
        return out


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_no_float64_anywhere(fused: bool, native: bool, clip: bool, memory: str) -> None:
    """Devices without float64 run every path, with any factors."""
    param, optimizer = problem(fused, kind=torch.optim.SGD)
    scaler = scaler_of(growth_factor=1.7, backoff_factor=0.3, growth_interval=1, hysteresis=2)
    scaler._native = native
    for gradient in (1.0, math.inf, math.nan, 1.0):
        param.grad = None
        with Float64():
            scaler.scale((param * gradient).sum()).backward()
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.outcome(optimizer).skipped is not math.isfinite(gradient)


# ---- devices without the _amp_* kernels --------------------------------------------------------


class NoKernels(TorchDispatchMode):
    """A device without torch's two kernels."""

    def __torch_dispatch__(
        self, func: Any, types: tuple[Any, ...], args: Any = (), kwargs: Any = None
    ) -> Any:
        assert "_amp_" not in str(func), func
        return func(*args, **(kwargs or {}))


def test_the_portable_update_equals_the_kernel() -> None:
    """Bit for bit over a hundred thousand scales and any factors, without float64."""
    draw = random.Random(0)
    for _ in range(300):
        growth, backoff = draw.choice([2.0, draw.uniform(1, 4)]), draw.choice([0.5, draw.random()])
        scale = torch.tensor(2.0 ** draw.uniform(-110, 120))
        tracker = torch.tensor(draw.randrange(3), dtype=torch.int32)
        mine, count = scale.clone(), tracker.clone()
        for _ in range(30):
            flag = torch.tensor(float(draw.random() < 0.4))
            torch._amp_update_scale_(scale, tracker, flag, growth, backoff, 3)
            _grads.update_scale_(mine, count, flag, growth, backoff, 3)
            assert torch.equal(mine, scale)
            assert torch.equal(count, tracker)
            assert count.dtype is torch.int32
            if not 2.0**-110 < scale.item() < 2.0**126:
                break


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [65536.0, 1.0, 3.7, 2.0**-20, 0.01])
def test_the_portable_unscaling_equals_the_kernel(dtype: torch.dtype, scale: float) -> None:
    """Bit for bit, on finite and other values."""
    generator = torch.Generator().manual_seed(0)
    inverse = torch.tensor(scale).reciprocal()
    assert torch.equal(inverse, torch.tensor(scale).double().reciprocal().float())
    for extra in ([], [math.inf], [-math.inf, math.nan]):
        values = torch.randn(500, generator=generator) * 1000
        grads = [torch.cat([values, torch.tensor(extra)]).to(dtype), torch.zeros(0, dtype=dtype)]
        groups = {(torch.device("cpu"), dtype, torch.Tensor): [g.clone() for g in grads]}
        mine = _grads.unscale_(groups, inverse, native=False, may_overflow=True)
        flag = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse)
        assert torch.equal(mine[torch.device("cpu")], flag)
        (unscaled,) = groups.values()
        torch.testing.assert_close(unscaled[0], grads[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fused", [False, True])
def test_a_device_without_the_kernels(
    fused: bool, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    """A backend that declares no kernels gets plain ops, no host sync more, and torch's numbers."""
    backend = get_backend("cpu")
    support = ScalerSupport(False, False, True, fused)
    with replaced(dataclasses.replace(backend, scaler=lambda hardware: support)):
        ours = scaler_of(growth_interval=2)
    assert ours._native is False
    theirs = torch.amp.GradScaler("cpu", growth_interval=2)
    (param, optimizer), (twin, reference) = problem(fused), problem(fused)
    for gradient in (1.0, 2.0, math.inf, 0.5, 0.5, math.nan, 3.0):
        with NoKernels():
            iterate(ours, param, optimizer, gradient)
        iterate(theirs, twin, reference, gradient)
        assert torch.equal(param, twin)
        assert ours.get_scale() == theirs.get_scale()


class replaced:
    """A backend put in another's place for a while."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.before = backend, get_backend(backend.device_type)

    def __enter__(self) -> None:
        _registry.register_backend(self.backend, replace=True)

    def __exit__(self, *exc: Any) -> None:
        _registry.register_backend(self.before, replace=True)


# ---- hardware that saturates -------------------------------------------------------------------


class Saturating(torch.amp.GradScaler):
    """A vendor's scaler: it knows of overflows by other means."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("cpu", **kwargs)


def saturating(vendor: Callable[..., Any] | None) -> Any:
    support = ScalerSupport(True, True, False, True)
    fp16 = DtypeSupport("native", True, "made up")
    return replaced(
        dataclasses.replace(
            get_backend("cpu"),
            scaler=lambda hardware: support,
            dtypes=lambda hardware: {torch.float16: fp16},
            vendor_scaler=vendor,
        )
    )


@pytest.mark.filterwarnings("ignore::amphal.PrecisionWarning")
def test_fp16_where_nothing_sees_an_overflow_is_refused() -> None:
    """enabled=True on an fp16 plan of such hardware says what is wrong; without it: no scaling."""
    with saturating(None):
        plan = amphal.detect("cpu", precision="fp16")
        assert not plan.grad_scaler().is_enabled()
        with pytest.raises(ArgumentError, match="saturates instead of giving inf"):
            amphal.GradScaler(plan, enabled=True)
        amphal.GradScaler(amphal.detect("cpu", precision="fp32"), enabled=True)


def test_the_vendors_scaler_decides_there() -> None:
    """The backend's vendor_scaler is behind the same interface; what it can't do is refused."""
    with saturating(lambda: Saturating):
        scaler = amphal.GradScaler("cpu", init_scale=8.0)
        with pytest.raises(ArgumentError, match="max_scale cannot be had"):
            amphal.GradScaler("cpu", max_scale=2.0**20)
    assert isinstance(scaler, amphal.GradScaler)
    assert isinstance(scaler, VendorScaler)
    assert isinstance(scaler._vendor, Saturating)
    param, optimizer = problem(kind=torch.optim.SGD)
    for gradient in (1.0, math.inf):
        param.grad = None
        scaler.scale((param * gradient).sum()).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step_all([optimizer])
        scaler.update()
        assert scaler.outcome(optimizer).skipped is not math.isfinite(gradient)
    assert scaler.get_scale() == 4.0
    assert (scaler.steps, scaler.skipped) == (1, 1)
    torch.testing.assert_close(param.detach(), torch.full((3,), 1 - 0.1 / 3**0.5))
    with pytest.raises(StateDictError):
        scaler.load_state_dict({**scaler.state_dict(), "scale": 0.0})
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    assert scaler.get_scale() == 2.0
    with pytest.raises(BackendError, match="step them one by one"):
        scaler.step_all([optimizer, problem()[1]])


@pytest.mark.parametrize("bad", [None, math.inf, math.nan, 3e38])
def test_large_gradients_are_checked_exactly(bad: float | None) -> None:
    """They are read by a faster product first, which may overflow where no element does."""
    param = torch.nn.Parameter(torch.ones(1 << 16))
    optimizer = torch.optim.SGD([param], lr=0.1, fused=True)
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    param.grad = torch.ones(1 << 16)
    if bad is not None:
        param.grad[777] = bad
    scaler.step(optimizer)
    scaler.update()
    assert scaler.outcome(optimizer).skipped is (bad in (math.inf,) or bad != bad)
    assert param.isfinite().all()


@pytest.mark.parametrize("call", ["step", "unscale_", "clip_grad_norm_"])
def test_lazily_conjugated_gradients(call: str) -> None:
    """A complex gradient with a conj bit is unscaled in place like any other."""
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = torch.optim.SGD([param], lr=0.1)
    grad = torch.tensor([1 + 2j, 3 - 1j, -2j])
    scaler = scaler_of(init_scale=4.0)
    scaler.scale(torch.ones(()))
    param.grad = (grad * 4).conj()
    assert param.grad.is_conj()
    if call == "clip_grad_norm_":
        scaler.clip_grad_norm_(optimizer, math.inf)
    elif call == "unscale_":
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    torch.testing.assert_close(param.grad, grad.conj())
    torch.testing.assert_close(param.detach(), 1 - 0.1 * grad.conj())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("method", ["step", "update"])
def test_step_and_update_can_be_compiled(fused: bool, method: str) -> None:
    """torch.compile around a call gives what the call gives."""
    torch._dynamo.reset()
    param, optimizer = problem(fused, kind=torch.optim.SGD)
    scaler = scaler_of()
    scaler.scale((param * 2.0).sum()).backward()
    for name, args in (("step", (optimizer,)), ("update", ())):
        call = getattr(scaler, name)
        (torch.compile(call, backend="eager") if name == method else call)(*args)
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.8))
    assert scaler.steps == 1


def test_unscale_can_be_compiled() -> None:
    """What a compiled unscale_ notes is there for the step: nothing is divided twice."""
    torch._dynamo.reset()
    param, optimizer = problem(kind=torch.optim.SGD)
    scaler = scaler_of()
    scaler.scale((param * 2.0).sum()).backward()
    torch.compile(scaler.unscale_, backend="eager")(optimizer)
    scaler.step(optimizer)
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.8))


@pytest.mark.parametrize("init_scale", [1.0, 0.25])
def test_the_unscale_hook_takes_an_inverse_of_one_element(init_scale: float) -> None:
    """torch's hook takes an inverse scale of shape (1,); so does amphal's, by kernel or not."""
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.full((2,), 8.0)
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = amphal.GradScaler("cpu", enabled=True, init_scale=init_scale)
    flags = scaler._unscale_grads_(optimizer, torch.full((1,), 0.25), torch.zeros(1), False)
    assert [flag.item() for flag in flags.values()] == [0.0]
    assert torch.equal(param.grad, torch.full((2,), 2.0))


def test_the_unscale_hook_sums_duplicate_float16_indices_first() -> None:
    """64000 twice at one index is inf in float16, though each value alone is finite."""
    param = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.float16))
    values = torch.full((2, 3), 64000.0, dtype=torch.float16)
    param.grad = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), values, (4, 3))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = amphal.GradScaler("cpu", enabled=True, init_scale=2.0)
    flags = scaler._unscale_grads_(optimizer, torch.tensor(0.5), torch.zeros(()), True)
    assert [flag.item() for flag in flags.values()] == [1.0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("call", ["unscale_", "clip", "unscale_ and clip"])
@pytest.mark.parametrize("slope", [2.0, float("inf"), float("nan")])
def test_parameters_that_join_after_unscaling_are_unscaled_and_checked(
    slope: float, call: str, fused: bool
) -> None:
    """A parameter added between ``unscale_`` or a clip and ``step`` steps by its own gradient."""
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.SGD([first], lr=1.0, fused=fused)
    scaler = amphal.GradScaler("cpu", enabled=True)
    scaler.scale((first * 2 + second * slope).sum()).backward()
    if call != "clip":
        scaler.unscale_(optimizer)
    if call == "clip":
        scaler.clip_grad_norm_(optimizer, 1e9)
    optimizer.add_param_group({"params": [second]})
    if call == "unscale_ and clip":
        assert torch.equal(
            scaler.clip_grad_norm_(optimizer, 1e9).isfinite(), torch.tensor(slope == 2.0)
        )
    scaler.step(optimizer)
    scaler.update()
    stepped = slope == 2.0
    assert scaler.outcome(optimizer).stepped is stepped
    expected = -1.0 if stepped else 1.0
    assert [first.item(), second.item()] == [expected, expected]
    assert scaler.get_scale() == (2.0**16 if stepped else 2.0**15)
