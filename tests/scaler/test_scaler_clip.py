"""Clipping in one read: the norm, gradients and parameters that torch's three calls give."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.scaler import problem, scaler_of
from torch.utils._python_dispatch import TorchDispatchMode

import amphal
from amphal._scaler import gradients as _grads
from amphal.errors import ArgumentTypeError, NonFiniteGradientError, ScalerStateError

SHAPES = [(3,), (4, 5), (1,), (0,), (2, 3, 2)]


def gradients(
    magnitude: float, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(s, generator=generator) * magnitude).to(dtype) for s in SHAPES]


def model(
    kind: Callable[..., torch.optim.Optimizer], fused: bool, dtype: torch.dtype = torch.float32
) -> Any:
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
    return params, kind(groups, lr=0.1, fused=fused)


def three_calls(
    scaler: torch.amp.GradScaler,
    params: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    scaler.unscale_(optimizer)
    filled = [param for param in params if param.numel()]  # torch has no inf-norm of an empty one
    norm = torch.nn.utils.clip_grad_norm_(filled, max_norm, norm_type)
    scaler.step(optimizer)
    scaler.update()
    return norm


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("max_norm", "norm_type"), [(1.0, 2.0), (0.1, math.inf), (3.0, 1.0), (2.0, 3.0)]
)
def test_it_equals_torchs_three_calls(
    kind: type[torch.optim.Optimizer],
    fused: bool,
    dtype: torch.dtype,
    max_norm: float,
    norm_type: float,
    memory: str,
) -> None:
    """The norm, .grad after the step and the parameters are those of unscale, clip and step."""
    ours, theirs = scaler_of(), torch.amp.GradScaler("cpu")
    params, optimizer = model(kind, fused, dtype)
    twins, reference = model(kind, fused, dtype)
    tolerance: dict[str, Any] = (
        {"rtol": 2e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    )
    for scaler in (ours, theirs):
        scaler.scale(torch.ones(()))
    for number, magnitude in enumerate((0.01, 1.0, 100.0)):
        for param, twin, grad in zip(
            params, twins, gradients(magnitude * 65536, dtype, number), strict=True
        ):
            param.grad, twin.grad = grad, grad.clone()
        norm = ours.clip_grad_norm_(optimizer, max_norm, norm_type)
        ours.step(optimizer)
        ours.update()
        expected = three_calls(theirs, twins, reference, max_norm, norm_type)
        assert norm.dtype == expected.dtype
        torch.testing.assert_close(norm, expected)
        for param, twin in zip(params, twins, strict=True):
            torch.testing.assert_close(param.grad, twin.grad, **tolerance)
            torch.testing.assert_close(param, twin, **tolerance)


class Passes(TorchDispatchMode):
    """Counts ops that read or write whole gradients."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.reads, self.writes = numel, 0, 0

    def __torch_dispatch__(
        self, func: Any, types: tuple[Any, ...], args: Any = (), kwargs: Any = None
    ) -> Any:
        big = args and isinstance(args[0], list) and any(t.numel() >= self.numel for t in args[0])
        if big:
            writes = func._schema.arguments[0].alias_info
            self.writes += bool(writes and writes.is_write)
            self.reads += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("fused", "writes"), [(True, 0), (False, 1)])
def test_the_gradients_are_read_once(fused: bool, writes: int) -> None:
    """Clipping reads them once; fused it writes nothing, unfused it writes once."""
    params = [torch.nn.Parameter(torch.ones(1000)) for _ in range(3)]
    optimizer = torch.optim.AdamW(params, fused=fused)
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    for param in params:
        param.grad = torch.ones(1000)
    with Passes(1000) as passes:
        scaler.clip_grad_norm_(optimizer, 1.0)
    assert (passes.reads - passes.writes, passes.writes) == (1, writes)
    if fused:
        assert params[0].grad is not None
        assert torch.equal(params[0].grad, torch.ones(1000))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_skips_and_tells_the_norm(fused: bool, bad: float, memory: str) -> None:
    """The norm is not finite, the step is skipped, the scale backs off."""
    param, optimizer = problem(fused)
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    param.grad = torch.tensor([1.0, bad, 1.0])
    assert not scaler.clip_grad_norm_(optimizer, 1.0).isfinite()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.outcome(optimizer).skipped
    assert torch.equal(param, torch.ones(3))
    assert scaler.get_scale() == 32768.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_norm_may_overflow_where_no_gradient_does(fused: bool) -> None:
    """The exact check follows, and the step is torch's."""
    ours, theirs = scaler_of(), torch.amp.GradScaler("cpu")
    results = []
    for scaler in (ours, theirs):
        param, optimizer = problem(fused, kind=torch.optim.SGD)
        scaler.scale(torch.ones(()))
        param.grad = torch.full((3,), 1e21)
        if scaler is ours:
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.outcome(optimizer).stepped
        else:
            three_calls(scaler, [param], optimizer, 1.0, 2.0)
        results.append(param)
    torch.testing.assert_close(*results)
    assert ours.get_scale() == theirs.get_scale()


def test_on_a_device_the_exact_check_waits_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfused, where the host cannot see the flag: same step as torch, also with step_all."""
    monkeypatch.setattr(amphal._scaler.gradients, "host_value", lambda scalar: None)
    scaler = scaler_of()
    (huge, first), (small, second) = problem(kind=torch.optim.SGD), problem(kind=torch.optim.SGD)
    scaler.scale(torch.ones(()))
    huge.grad, small.grad = torch.full((3,), 1e21), torch.ones(3)
    for optimizer in (first, second):
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step_all([first, second])
    scaler.update()
    assert scaler.outcome(first).stepped
    torch.testing.assert_close(huge.detach(), torch.full((3,), 1 - 0.1 / 3**0.5))
    assert scaler.get_scale() == 65536.0


def test_fused_on_a_device_such_a_norm_counts_as_an_overflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Documented: a scaled norm beyond 2**64 skips, and the scale backs off until it fits."""
    monkeypatch.setattr(amphal._scaler.gradients, "host_value", lambda scalar: None)
    scaler = scaler_of()
    param, optimizer = problem(True)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((3,), 1e21)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.outcome(optimizer).skipped
    assert torch.equal(param, torch.ones(3))
    assert scaler.get_scale() == 32768.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_very_small_scale_still_gives_the_right_norm(fused: bool, memory: str) -> None:
    """Where squares of the scaled gradients would vanish, they are unscaled first."""
    param, optimizer = problem(fused, kind=torch.optim.SGD)
    scaler = scaler_of(init_scale=2.0**-110)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((3,), 2.0**-110)
    torch.testing.assert_close(scaler.clip_grad_norm_(optimizer, 1.0), torch.tensor(3.0**0.5))
    scaler.step(optimizer)
    torch.testing.assert_close(param.detach(), torch.full((3,), 1 - 0.1 / 3**0.5))


@pytest.mark.parametrize("fused", [False, True])
def test_after_unscale_it_clips_what_is_there(fused: bool) -> None:
    """unscale_ then clip_grad_norm_ is fine, and .grad is clipped at once."""
    param, optimizer = problem(fused)
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    param.grad = torch.full((3,), 65536.0)
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 1.0)
    torch.testing.assert_close(param.grad.norm(), torch.tensor(1.0))
    scaler.step(optimizer)
    assert scaler.outcome(optimizer).stepped


def test_fused_it_clips_once() -> None:
    """A second clipping, or an unscale_, after a folded one is an error that says so."""
    param, optimizer = problem(True)
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    param.grad = torch.full((3,), 65536.0)
    scaler.clip_grad_norm_(optimizer, 1.0)
    for call in (
        lambda: scaler.clip_grad_norm_(optimizer, 1.0),
        lambda: scaler.unscale_(optimizer),
        lambda: scaler.clip_grad_norm_([param], 1.0),
    ):
        with pytest.raises(ScalerStateError, match="clip"):
            call()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", [False, True])
def test_parameters_without_their_optimizer(fused: bool, unscaled: bool) -> None:
    """model.parameters() may be given, before or after unscale_: the step is the same."""
    param, optimizer = problem(fused, kind=torch.optim.SGD)
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    param.grad = torch.full((3,), 65536.0)
    if unscaled:
        scaler.unscale_(optimizer)
    norm = scaler.clip_grad_norm_((p for p in [param]), 1.0)
    torch.testing.assert_close(norm, torch.tensor(3.0**0.5))
    scaler.step(optimizer)
    torch.testing.assert_close(param.detach(), torch.full((3,), 1 - 0.1 / 3**0.5))


def test_parameters_half_unscaled_are_refused() -> None:
    """Some unscaled and some not have no common norm."""
    (a, first), (b, _) = problem(), problem()
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    a.grad, b.grad = torch.ones(3), torch.ones(3)
    scaler.unscale_(first)
    with pytest.raises(ScalerStateError, match="some are unscaled"):
        scaler.clip_grad_norm_([a, b], 1.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_error_if_nonfinite_names_the_parameters_and_changes_nothing(
    fused: bool, enabled: bool
) -> None:
    """The error is torch's kind; the gradients are as they were and the step can be skipped."""
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    scaler = amphal.GradScaler("cpu", enabled=enabled, model=net)
    scaler.scale(torch.ones(()))
    net.weight.grad, net.bias.grad = torch.ones(1, 2), torch.tensor([math.inf])
    with pytest.raises(RuntimeError, match=r"Not finite: bias\.") as caught:
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert isinstance(caught.value, NonFiniteGradientError)
    assert torch.equal(net.weight.grad, torch.ones(1, 2))
    if enabled:
        scaler.step(optimizer)
        assert scaler.outcome(optimizer).skipped


def test_a_sparse_gradient_is_clipped_by_its_true_norm() -> None:
    """Duplicate indices are summed before the norm is taken."""
    for disabled in (False, True):
        table = torch.nn.Embedding(4, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        scaler = amphal.GradScaler("cpu", enabled=not disabled)
        before = table.weight.detach().clone()
        scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        torch.testing.assert_close(norm, torch.tensor(10.0**0.5))
        scaler.step(optimizer)
        torch.testing.assert_close((before - table.weight).norm(), torch.tensor(1.0))


def test_a_complex_gradient_is_clipped() -> None:
    """The norm is that of the magnitudes."""
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    param.grad = torch.full((2,), 3 + 4j) * 65536
    torch.testing.assert_close(scaler.clip_grad_norm_(optimizer, 1.0), torch.tensor(50.0**0.5))
    scaler.step(optimizer)
    torch.testing.assert_close(param.detach().abs().norm(), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((-1.0,), "max_norm must be 0 or more"),
        ((math.nan,), "max_norm must be 0 or more"),
        (("1",), "max_norm must be a number"),
        ((True,), "max_norm must be a number"),
        ((1.0, 0), "norm_type must be more than 0"),
        ((1.0, "two"), "norm_type must be a number"),
        ((1.0, 2.0, 1), "error_if_nonfinite must be"),
    ],
)
def test_bad_arguments(args: Any, words: str) -> None:
    """Each argument has a rule, and the message says it."""
    _, optimizer = problem()
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    with pytest.raises(amphal.AmphalError, match=words):
        scaler.clip_grad_norm_(optimizer, *args)


@pytest.mark.parametrize("what", [torch.nn.Linear(1, 1), None, 3, [1]])
def test_bad_targets(what: Any) -> None:
    """A model, or anything that holds no parameters, is refused."""
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    with pytest.raises(ArgumentTypeError, match="takes an optimizer"):
        scaler.clip_grad_norm_(what, 1.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("other", [None, torch.bfloat16, torch.float64])
def test_the_norm_of_large_gradients_is_exact_enough(
    fused: bool, other: torch.dtype | None
) -> None:
    """To 1e-5 of the norm in double; they are summed by another kernel than small ones."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1 << 16,), (300, 200), (7,)]
    params = [torch.nn.Parameter(torch.zeros(s)) for s in shapes]
    if other is not None:
        params.append(torch.nn.Parameter(torch.zeros(50, dtype=other)))
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    double = [p.grad.double() / 65536 for p in params if p.grad is not None]
    expected = torch.nn.utils.get_total_norm(double)
    norm = scaler.clip_grad_norm_(optimizer, 1e-3)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0)
    scaler.step(optimizer)
    step = torch.cat([p.detach().double().flatten() for p in params])
    torch.testing.assert_close(step.norm(), torch.tensor(1e-3).double(), rtol=1e-3, atol=0)


def test_frozen_parameters_have_no_say_in_whether_gradients_are_unscaled() -> None:
    """clip_grad_norm_(model.parameters()) after unscale_, with a frozen layer and an unused one."""
    net = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1)
    scaler = scaler_of()
    scaler.scale(net[1](net[0](torch.ones(1, 2))).sum()).backward()
    scaler.unscale_(optimizer)
    expected = torch.nn.utils.get_total_norm(
        [p.grad for p in net[1].parameters() if p.grad is not None]
    )
    assert torch.equal(scaler.clip_grad_norm_(net.parameters(), 1.0), expected)


@pytest.mark.parametrize(("scale", "order", "slope"), [(2.0**100, 2.0, 1.0), (2.0**16, 4.0, 1e6)])
def test_parameters_whose_scaled_norm_overflows_are_clipped_as_torch_clips(
    scale: float, order: float, slope: float
) -> None:
    """Finite gradients make a real step, also where the scaled norm does not fit into float32."""
    results = []
    for kind in (amphal.GradScaler, torch.amp.GradScaler):
        param = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([param], lr=0.1)
        scaler = kind("cpu", init_scale=scale, enabled=True)
        scaler.scale((param * slope).sum()).backward()
        if isinstance(scaler, amphal.GradScaler):
            norm = scaler.clip_grad_norm_([param], 1.0, order)
        else:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_([param], 1.0, order)
        scaler.step(optimizer)
        results.append((norm, param.grad, param.detach()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_where_the_host_sees_no_overflow_of_parameters_the_step_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device, where asking would wait, an overflowing 2-norm skips; no step with 0."""
    monkeypatch.setattr(_grads, "host_value", lambda scalar: None)
    param, optimizer = problem(kind=torch.optim.SGD)
    scaler = scaler_of(init_scale=2.0**100)
    scaler.scale(param.sum()).backward()
    scaler.clip_grad_norm_([param], 1.0)
    scaler.step(optimizer)
    assert scaler.outcome(optimizer).skipped


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_an_overflow_of_the_scaled_norm_alone_is_no_error(
    fused: bool, whole: bool, memory: str
) -> None:
    """error_if_nonfinite speaks of the unscaled gradients, for an optimizer and for parameters."""
    param, optimizer = problem(fused, kind=torch.optim.SGD)
    scaler = scaler_of(init_scale=2.0**100)
    scaler.scale(param.sum()).backward()
    what = optimizer if whole else [param]
    norm = scaler.clip_grad_norm_(what, 1.0, error_if_nonfinite=True)
    assert float(norm) == pytest.approx(math.sqrt(3))
    scaler.step(optimizer)
    torch.testing.assert_close(param.detach(), torch.full((3,), 1 - 0.1 / math.sqrt(3)))


@pytest.mark.parametrize("order", [1.0, 2.0])
@pytest.mark.parametrize("whole", [False, True])
def test_a_nonfinite_gradient_error_changes_nothing(order: float, whole: bool, memory: str) -> None:
    """The gradients are as they were, so unscale_ may still be called."""
    param, optimizer = problem()
    scaler = scaler_of()
    scaler.scale((param * torch.tensor([1.0, math.inf, 2.0])).sum()).backward()
    assert param.grad is not None
    before = param.grad.clone()
    with pytest.raises(NonFiniteGradientError, match=r"group 0, param 0"):
        scaler.clip_grad_norm_(optimizer if whole else [param], 1.0, order, True)
    assert torch.equal(param.grad, before)
    scaler.unscale_(optimizer)


def test_a_clipping_too_strong_to_be_folded_is_done_exactly() -> None:
    """scale / clipping beyond float32 would make a fused step of 0."""
    param, optimizer = problem(fused=True, kind=torch.optim.SGD)
    scaler = scaler_of()
    scaler.scale((param * 1e32).sum()).backward()
    scaler.clip_grad_norm_(optimizer, 1e-3, math.inf)
    scaler.step(optimizer)
    torch.testing.assert_close(param.grad, torch.full((3,), 1e-3))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize(
    ("norm_type", "magnitude"), [(2.0, 2.0**66), (3.0, 2.0**50), (1.0, 2.0**127)]
)
@pytest.mark.parametrize("by_params", [False, True])
def test_an_infinite_bound_writes_nothing_where_the_norm_overflows(
    fused: bool, enabled: bool, norm_type: float, magnitude: float, by_params: bool
) -> None:
    """Finite gradients whose norm overflows are stepped as they are with ``max_norm=inf``."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=1 / magnitude, fused=fused)
    scaler = amphal.GradScaler("cpu", enabled=enabled, init_scale=1.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((4,), magnitude)
    norm = scaler.clip_grad_norm_([param] if by_params else optimizer, math.inf, norm_type)
    scaler.step(optimizer)
    scaler.update()
    assert norm == pytest.approx(magnitude * 4 ** (1 / norm_type), rel=1e-6) or (
        norm == math.inf and magnitude == 3e38
    )
    assert torch.equal(param.grad, torch.full((4,), magnitude))
    assert torch.equal(param, torch.zeros(4))


OVERFLOWING = [  # the norm of four of these: the powers overflow; in the last one the norm too
    (2.0, 2.0**65, 2.0**66),
    (2.0, 2.0**126, 2.0**127),
    (3.0, 2.0**50, 2.0**50 * 4 ** (1 / 3)),
    (0.5, 2.0**123, 2.0**127),
    (100.0, 2.0**4, 2.0**4 * 4 ** (1 / 100)),
    (1.0, 2.0**127, math.inf),
]


@pytest.mark.parametrize("call", ["optimizer", "parameters", "unscaled", "disabled"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("norm_type", "magnitude", "right"), OVERFLOWING)
def test_an_overflow_of_the_powers_alone_is_clipped(
    norm_type: float, magnitude: float, right: float, fused: bool, call: str
) -> None:
    """Finite gradients of a norm beyond the powers are clipped to ``max_norm``, never zeroed."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    scaler = amphal.GradScaler("cpu", enabled=call != "disabled", init_scale=1.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((4,), magnitude)
    if call == "unscaled":
        scaler.unscale_(optimizer)
    norm = scaler.clip_grad_norm_([param] if call == "parameters" else optimizer, 1.0, norm_type)
    scaler.step(optimizer)
    clipped = 4 ** (-1 / norm_type)
    assert scaler.outcome(optimizer).stepped
    assert norm.item() == pytest.approx(right, rel=1e-6)
    assert torch.allclose(param.grad, torch.full((4,), clipped), rtol=1e-6, atol=0)
    assert torch.allclose(param, torch.full((4,), 1 - clipped), rtol=1e-5, atol=0)


@pytest.mark.parametrize("by_params", [False, True])
def test_scaled_gradients_are_clipped_by_the_norm_without_the_scale(by_params: bool) -> None:
    """The scaled powers overflow: the norm and the clipping are those of the unscaled gradients."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = amphal.GradScaler("cpu", enabled=True, init_scale=4.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((4,), 2.0**70)
    norm = scaler.clip_grad_norm_([param] if by_params else optimizer, 2.0**60)
    scaler.step(optimizer)
    assert norm == 2.0**69
    assert torch.equal(param.grad, torch.full((4,), 2.0**59))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_disabled_scaler_clips_where_the_norm_exceeds_the_dtype(dtype: torch.dtype) -> None:
    """A norm beyond float16, float32 or float64 clips by the right coefficient."""
    param = torch.nn.Parameter(torch.ones(16, dtype=dtype))
    param.grad = torch.full((16,), torch.finfo(dtype).max, dtype=dtype)
    norm = amphal.GradScaler("cpu", enabled=False).clip_grad_norm_(param, 1.0)
    assert norm == math.inf
    assert norm.dtype is dtype
    quarter = torch.full((16,), 0.25, dtype=dtype)
    assert torch.allclose(param.grad, quarter, rtol=2e-3 if dtype is torch.float16 else 1e-6)


def test_error_if_nonfinite_takes_a_norm_that_fits() -> None:
    """``error_if_nonfinite`` raises where the norm is not finite, not where its square is."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = amphal.GradScaler("cpu", enabled=True, init_scale=1.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((4,), 2.0**70)
    assert scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True) == 2.0**71
    assert torch.equal(param.grad, torch.full((4,), 0.5))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_still_skips(bad: float) -> None:
    """One inf or NaN among finite gradients of an overflowing norm: skipped, weights kept."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = amphal.GradScaler("cpu", enabled=True, init_scale=1.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.tensor([2.0**70, bad, 1.0, 2.0**70])
    assert not scaler.clip_grad_norm_(optimizer, 1.0).isfinite()
    scaler.step(optimizer)
    assert scaler.outcome(optimizer).skipped
    assert torch.equal(param, torch.ones(4))


def test_a_norm_that_the_host_cannot_see_skips_instead_of_zeroing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an accelerator an overflow of the norm of unscaled gradients is a skip, with no wait."""
    monkeypatch.setattr(_grads, "host_value", lambda scalar: None)
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=1.0, momentum=0.9)
    scaler = amphal.GradScaler("cpu", enabled=True, init_scale=1.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((4,), 2.0**70)
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    assert scaler.outcome(optimizer).skipped
    assert torch.equal(param, torch.ones(4))
    assert not optimizer.state
