"""The part of the conformance suite that computes: on the device, or on fake tensors of it."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .. import _front
from .._autocast import autocast
from .._casting import op_lists, rules
from .._torch import private
from ..contract import LOW_PRECISION, qualified
from ..errors import OpPolicyError, PrecisionWarning
from ._calls import CALLS, expected_dtype
from ._observe import observe_policy
from ._subject import Subject, needs_device, precision_named, torch_state
from ._training import Training

__all__ = ["DeviceChecks"]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_by_dtype = pytest.mark.parametrize("dtype", LOW_PRECISION, ids=_NAMES.get)


def _need_dtype(plan: _front.Plan, dtype: torch.dtype) -> None:
    support = plan.support[dtype]
    if support.level == "absent":
        pytest.skip(f"no {_NAMES[dtype]} on {plan.hardware.name}: {support.why}")


class DeviceChecks:
    """Casting, regions, the scaler, and the facts that the backend claims."""

    @_by_dtype
    def test_op_lists_are_true_for_the_dispatcher(
        self, subject: Subject, dtype: torch.dtype
    ) -> None:
        """Every op that autocast casts on this device is on the lists."""
        with _work(subject, dtype) as plan:
            _need_dtype(plan, dtype)
            with _region(subject, dtype):
                lists = op_lists(subject.device_type, dtype)
        assert not lists.unclassified, (
            f"the dispatcher casts these and op_lists({dtype}) doesn't say how: "
            f"{', '.join(sorted(lists.unclassified))}"
        )
        assert len(lists) > len(lists.as_is), "none of the declared ops is cast by this torch"

    @_by_dtype
    def test_every_listed_op_follows_its_policy(
        self, subject: Subject, dtype: torch.dtype, request: pytest.FixtureRequest
    ) -> None:
        """What autocast does to the inputs of each listed op, seen on fake tensors, is declared."""
        with _work(subject, dtype) as plan:
            _need_dtype(plan, dtype)
            with _region(subject, dtype):
                lists = op_lists(subject.device_type, dtype)
        wrong, unseen = [], []
        for op, declared in lists:
            try:
                seen = observe_policy(subject.device_type, op, dtype)
            except OpPolicyError:  # its kernel wants more than inputs of the right kind
                unseen.append(op)
            else:
                if seen != declared:
                    wrong.append(f"{op} is declared {declared}, observed: {seen}")
        assert not wrong, "; ".join(wrong)
        assert len(unseen) <= len(lists) // 10, f"could not be observed: {', '.join(unseen)}"
        how = f"on fake tensors, but for {', '.join(unseen)}" if unseen else "on fake tensors"
        request.node.user_properties.append(("amphal: proven", how))

    @_by_dtype
    def test_autocast_casts_as_declared(
        self, subject: Subject, dtype: torch.dtype, request: pytest.FixtureRequest
    ) -> None:
        """Each common op computes in the dtype that its policy says, listed or not.

        An op that the device lacks is passed over, and the summary names it.
        """
        key = private.autocast_key(subject.device_type)
        wrong, unseen, lacking, ran = [], set(), set(), set()
        with _work(subject, dtype) as plan:
            _need_dtype(plan, dtype)
            region = _region(subject, dtype)
            with region:
                policy = dict(op_lists(subject.device_type, dtype))
            for op, call in CALLS.items():
                for given, other in _given(policy.get(op), dtype):
                    want = expected_dtype(policy.get(op), given, dtype)
                    try:
                        with region:
                            got = call(_maker(subject, given, other)).dtype
                    except RuntimeError as exc:
                        if not subject.availability:
                            unseen.add(op)  # its fake kernel asks the absent driver
                        elif _computes(call, subject, want):
                            wrong.append(f"{op} of {given} raised only in the region: {exc}")
                        else:
                            lacking.add(op)
                        continue
                    ran.add(op)
                    # Autocast passes by an op without a kernel; what it is made of may be cast.
                    cast = op in policy or private.has_kernel(qualified(op), key)
                    if got is not want and cast:
                        wrong.append(f"{op} of {given} gave {got}, declared: {want}")
        assert not wrong, "; ".join(wrong)
        assert len(unseen) <= len(CALLS) // 4, f"could not be run: {', '.join(sorted(unseen))}"
        assert ran, "the device lacks every common op"
        if lacking:
            how = f"{subject.proof}, {len(ran)} ops; it lacks {', '.join(sorted(lacking))}"
            request.node.user_properties.append(("amphal: proven", how))

    @_by_dtype
    def test_a_banned_op_is_refused(self, subject: Subject, dtype: torch.dtype) -> None:
        """An op on the list ``banned`` raises in the region; off the list it computes."""
        with _work(subject, dtype) as plan:
            _need_dtype(plan, dtype)
            x = subject.tensor(4, dtype=torch.float32)
            call = torch.nn.functional.binary_cross_entropy
            with _region(subject, dtype):
                if "binary_cross_entropy" in op_lists(subject.device_type, dtype).banned:
                    with pytest.raises((RuntimeError, OpPolicyError), match="binary_cross_entropy"):
                        call(x, x)
                else:
                    assert call(x, x).dtype is torch.float32

    def test_a_region_restores_what_it_found(self, subject: Subject) -> None:
        """After nested regions, left by an exception too, torch's autocast state is as before."""
        before = torch_state(subject.device_type)
        with _work(subject) as plan:
            dtypes = [d for d in LOW_PRECISION if plan.support[d].level != "absent"]
            with contextlib.suppress(ZeroDivisionError):
                with _region(subject, torch.float32):
                    for dtype in dtypes:
                        with _region(subject, dtype):
                            assert torch.is_autocast_enabled(subject.device_type)
                            assert torch.get_autocast_dtype(subject.device_type) is dtype
                    assert not torch.is_autocast_enabled(subject.device_type)
                    raise ZeroDivisionError
        assert torch_state(subject.device_type) == before

    def test_fp32_means_full_precision(self, subject: Subject) -> None:
        """A region of float32 is full precision on this device, without a warning."""
        with _work(subject), warnings.catch_warnings():
            warnings.simplefilter("error")
            with autocast(subject.device_type, dtype="fp32"):
                x = subject.tensor(4, 4)
                assert (x @ x).dtype is torch.float32

    @_by_dtype
    @needs_device
    def test_the_extension_agrees_on_dtypes(self, subject: Subject, dtype: torch.dtype) -> None:
        """``get_amp_supported_dtype()`` of the extension has each dtype that is not absent."""
        _need_dtype(_front.detect(subject.device_type), dtype)
        reason = rules.unsupported_by_module(subject.device_type, dtype)
        assert not reason, reason

    @_by_dtype
    @needs_device
    def test_the_device_computes_in_the_dtypes_it_claims(
        self, subject: Subject, dtype: torch.dtype
    ) -> None:
        """A matmul in each dtype that is not absent gives the numbers of float32, nearly."""
        plan = _front.detect(subject.device_type)
        _need_dtype(plan, dtype)
        x = subject.tensor(4, 4)
        want = x.cpu() @ x.cpu()
        got = (x.to(dtype) @ x.to(dtype)).cpu()
        assert got.dtype is dtype
        torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02)

    @needs_device
    def test_the_scaler_facts_are_true(self, subject: Subject) -> None:
        """float64, overflow, fused optimizers and ``_amp_*`` kernels are there where claimed."""
        facts = subject.backend.scaler(subject.backend.probe(None))
        if facts.fp64:
            assert subject.tensor(2, dtype=torch.float64).double().sum().item() > 0
        big = subject.tensor(2).fill_(60000.0).half() * 4
        overflows = not torch.isfinite(big.cpu()).all().item()
        assert overflows == facts.detects_overflow, (
            f"60000 * 4 in float16 gave {big.cpu()}; the backend says "
            f"detects_overflow={facts.detects_overflow}"
        )
        if facts.native_kernels:
            found = subject.tensor(1).fill_(0.0)
            torch._amp_foreach_non_finite_check_and_unscale_(
                [subject.tensor(2).fill_(float("inf"))], found, subject.tensor(1).fill_(1.0)
            )
            assert found.item() == 1.0, "the unscale kernel did not see an inf"
        if facts.fused_optimizers:
            weight = subject.tensor(2).requires_grad_()
            before, weight.grad = weight.detach().cpu().clone(), torch.ones_like(weight)
            optimizer = torch.optim.AdamW([weight], fused=True)
            optimizer.found_inf = subject.tensor(1).fill_(1.0).squeeze()  # type: ignore[attr-defined]
            optimizer.step()
            assert torch.equal(weight.detach().cpu(), before), "a fused step ignored found_inf"

    @needs_device
    def test_the_vendor_scaler_is_a_scaler(self, subject: Subject) -> None:
        """Where the hardware saturates, ``vendor_scaler()`` gives a torch.amp.GradScaler."""
        if subject.backend.vendor_scaler is None:
            facts = subject.backend.scaler(subject.backend.probe(None))
            plan = precision_named(subject, torch.float32)
            assert facts.detects_overflow or plan.support[torch.bfloat16].level != "absent", (
                "the hardware saturates, has no bf16, and the backend brings no vendor_scaler: "
                "nothing but fp32 can train"
            )
        else:
            kind = subject.backend.vendor_scaler()
            assert isinstance(kind, type), f"vendor_scaler() returned {kind!r}, not a class"
            assert issubclass(kind, torch.amp.GradScaler), f"{kind!r} is no torch.amp.GradScaler"

    @needs_device
    def test_synchronize_waits(self, subject: Subject) -> None:
        """``synchronize()`` can be called and the work before it is done."""
        x = subject.tensor(4, 4) + 1
        if subject.backend.synchronize is not None:
            subject.backend.synchronize()
        assert x.sum().item() > 16

    @needs_device
    def test_the_scaler_trains_through_an_overflow(self, subject: Subject) -> None:
        """An overflow skips the step and halves the scale; training then goes on and succeeds."""
        plan = _plan_or_skip(subject, torch.float16)
        if not plan.use_scaler:
            pytest.skip("the hardware saturates and has no vendor scaler: no scaling here")
        run = Training(plan, init_scale=2.0**24)
        # Too large for float32 too: what the device casts does not matter.
        before, first = run.weights(), run.step(times=2.0**120)
        assert run.scaler.get_scale() == 2.0**23, "the scale did not halve after an overflow"
        assert all(map(torch.equal, run.weights(), before)), (
            "a step with an overflow was not skipped"
        )
        assert run.scaler.skipped == 1, (
            f"a skipped step is counted as {run.scaler.skipped}: a vendor's scaler must leave its "
            "finding where torch's does (_found_inf_per_device)"
        )
        losses = [run.step() for _ in range(40)]
        assert run.scaler.get_scale() > 0
        assert all(torch.isfinite(w).all() for w in run.weights()), "the weights are not finite"
        assert losses[-1] < first / 2, f"it does not learn: the loss went {first} to {losses[-1]}"

    @needs_device
    @_by_dtype
    def test_a_model_trains_in(self, subject: Subject, dtype: torch.dtype) -> None:
        """The loop of the README learns in each dtype that the device has, named."""
        run = Training(_plan_or_skip(subject, dtype))
        losses = [run.step() for _ in range(30)]
        assert losses[-1] < losses[0] / 2, f"it does not learn: {losses[0]} to {losses[-1]}"
        assert dtype in run.seen, (
            f"no layer gave {dtype}, only {run.seen}: neither linear nor mm is cast in a region"
        )

    @needs_device
    def test_the_default_plan_trains(self, subject: Subject) -> None:
        """The loop that never names a dtype learns with the plan's dtype, scaler or not."""
        run = Training(_front.detect(subject.device_type))
        losses = [run.step() for _ in range(30)]
        assert losses[-1] < losses[0] / 2, f"it does not learn: {losses[0]} to {losses[-1]}"

    @needs_device
    def test_state_moves_to_the_cpu_and_back(self, subject: Subject) -> None:
        """Model, optimizer and scaler go to a file on the CPU and come back, bit for bit."""
        plan = _plan_or_skip(subject, torch.float16)
        run = Training(plan, init_scale=2.0**14)
        for _ in range(3):
            run.step()
        file = io.BytesIO()
        torch.save(run.state_on_cpu(), file)
        file.seek(0)
        saved = torch.load(file, map_location="cpu", weights_only=True)
        twin = Training(plan)
        twin.load(saved)
        assert all(map(torch.equal, twin.weights(), run.weights()))
        assert twin.scaler.get_scale() == run.scaler.get_scale()
        assert twin.step() == run.step(), "one step after loading gives another loss"
        assert all(map(torch.equal, twin.weights(), run.weights())), "and other weights"


@contextlib.contextmanager
def _work(subject: Subject, dtype: torch.dtype | None = None) -> Iterator[_front.Plan]:
    reason = subject.why_no_tensors()
    if reason:
        pytest.skip(f"no device, and no fake tensors of one: {reason}")
    with subject.at_work(dtype) as plan:
        yield plan


def _plan_or_skip(subject: Subject, dtype: torch.dtype) -> _front.Plan:
    """The plan for a named dtype; skips the check where the hardware cannot do it."""
    _need_dtype(_front.detect(subject.device_type), dtype)
    return precision_named(subject, dtype)


def _region(subject: Subject, dtype: torch.dtype) -> torch.autocast:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        return autocast(subject.device_type, dtype=dtype)


def _given(policy: str | None, low: torch.dtype) -> list[tuple[torch.dtype, torch.dtype]]:
    """Which dtypes to call an op with, so that a wrong policy shows; the widest one first."""
    if policy == "promote":
        return [(low, low), (torch.float32, low)]
    return [(torch.float32, torch.float32), (low, low)]


def _computes(call: Any, subject: Subject, dtype: torch.dtype) -> bool:
    """Whether the device has this op at all, outside of any region."""
    try:
        call(_maker(subject, dtype, dtype))
    except RuntimeError:
        return False
    return True


def _maker(subject: Subject, given: torch.dtype, other: torch.dtype) -> Any:
    def make(*shape: int, **second: bool) -> torch.Tensor:
        return subject.tensor(*shape, dtype=other if second else given)

    return make
