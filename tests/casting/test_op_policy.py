"""``amphal.autocast(ops=...)`` in eager code: exact, scoped, and leaving nothing behind."""

from __future__ import annotations

import gc
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amphal
from amphal import op_lists
from amphal._casting import installed as _registration
from amphal._casting import policy as _policy
from amphal.errors import ArgumentTypeError, OpPolicyError

LOW, FULL = torch.bfloat16, torch.float32
KEY = "AutocastCPU"
pytestmark = pytest.mark.filterwarnings("ignore::amphal.PrecisionWarning")


@pytest.fixture(autouse=True)
def no_thread_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that ran before the test (a compiler's) don't count: only those of the test do."""
    count = _registration._other_threads
    before = count()
    monkeypatch.setattr(_registration, "_other_threads", lambda: max(0, count() - before))


def region(ops: Any, **kwargs: Any) -> Any:
    return amphal.autocast("cpu", dtype="bf16", ops=ops, **kwargs)


def low(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(LOW)


def registered() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(KEY))


REACHED: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch function": lambda x: torch.softmax(x, -1),
    "functional": lambda x: F.softmax(x, -1),
    "method": lambda x: x.softmax(-1),
    "module": lambda x: nn.Softmax(-1)(x),
    "op": lambda x: torch.ops.aten.softmax.int(x, -1),
    "C++ inside a composite": lambda x: F.multi_head_attention_forward(
        x, x, x, 4, 2, torch.randn(12, 4), torch.zeros(12), None, None, False, 0.0,
        torch.randn(4, 4), torch.zeros(4), need_weights=True,
    )[1],
}  # fmt: skip


@pytest.mark.parametrize("way", REACHED)
def test_an_op_is_cast_however_it_is_reached(way: str) -> None:
    """softmax of bf16 stays bf16 on the CPU, and is float32 where the policy says so."""
    call, x = REACHED[way], low(3, 4)
    with region({}):
        assert call(x).dtype is LOW
    with region({"softmax": "fp32"}):
        assert call(x).dtype is FULL


def test_ops_inside_a_composite_op_are_cast() -> None:
    """instance_norm is made of batch_norm in C++; a policy for that reaches it."""
    x = torch.randn(2, 3, 4)
    with region({"batch_norm": "lower_precision"}):
        assert F.instance_norm(x).dtype is LOW
    with region({"layer_norm": "lower_precision"}):
        assert F.instance_norm(x).dtype is FULL


def test_as_is_holds_for_what_the_op_is_made_of() -> None:
    """linear is made of addmm, which is on the list itself; as_is leaves both alone."""
    x = torch.randn(4, 4, requires_grad=True)
    with region({"linear": "as_is"}):
        assert F.linear(x, x).dtype is FULL
        assert torch.mm(x, x).dtype is LOW


def test_an_op_that_whole_lists_leave_out_is_made_of_ops_that_they_have() -> None:
    """With lists, as in torch: cross_entropy is not on CUDA's, log_softmax and nll_loss are."""
    x, target = low(4, 3), torch.tensor([0, 1, 2, 0])
    with region(op_lists("cuda")):
        assert F.cross_entropy(x, target).dtype is FULL
    with region(op_lists("cuda").replace(nll_loss="lower_precision")):
        assert F.cross_entropy(x, target).dtype is LOW


def test_each_policy_does_what_it_says() -> None:
    """lower_precision, fp32, promote and as_is, against what the CPU does by itself."""
    x, full = low(4, 4), torch.randn(4, 4)
    with region({"layer_norm": "lower_precision"}):
        assert F.layer_norm(full, (4,)).dtype is LOW
    with region({"linear": "fp32"}):
        assert F.linear(x, full).dtype is FULL
    with region({"linear": "as_is"}):
        assert F.linear(full, full).dtype is FULL
    with region({"linear": "promote"}):
        assert F.linear(x, full).dtype is FULL
        assert F.linear(x, x).dtype is LOW
    with region({"cat": "lower_precision"}):
        assert torch.cat([x, full]).dtype is LOW


def test_values_are_those_of_casting_by_hand() -> None:
    """A policy gives bit for bit what explicit casts around the op give."""
    x, w, b = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    by_hand = F.layer_norm(x.to(LOW), (8,), w.to(LOW), b.to(LOW))
    with region({"layer_norm": "lower_precision"}):
        assert torch.equal(F.layer_norm(x, (8,), w, b), by_hand)
    with region({"softmax": "fp32"}):
        assert torch.equal(F.softmax(x.to(LOW), -1), F.softmax(x.to(LOW).float(), -1))


@pytest.mark.parametrize("policy", ["lower_precision", "fp32", "promote", "as_is"])
def test_gradients_flow_through_the_casts(policy: str) -> None:
    """Gradients equal those of explicit casts, and arrive in the dtype of the leaf."""
    x = torch.randn(3, 4, requires_grad=True)
    w = torch.randn(5, 4, requires_grad=True)
    with region({"linear": policy}):
        y = F.linear(x, w)
    y.float().square().sum().backward()
    dtype = LOW if policy == "lower_precision" else FULL
    again = [t.detach().clone().requires_grad_() for t in (x, w)]
    F.linear(*(t.to(dtype) for t in again)).float().square().sum().backward()
    for got, want in zip((x, w), again, strict=True):
        assert got.grad is not None
        assert want.grad is not None
        assert got.grad.dtype is FULL
        assert torch.equal(got.grad, want.grad)


def test_float64_integers_and_other_ops_are_left_alone() -> None:
    """Autocast never touches float64 or integers, and a policy doesn't either."""
    x = torch.randn(3, 4, dtype=torch.float64)
    with region({"softmax": "lower_precision", "cat": "fp32"}):
        assert F.softmax(x, -1).dtype is torch.float64
        assert torch.cat([torch.ones(2, dtype=torch.int64)] * 2).dtype is torch.int64
        assert torch.relu(low(3)).dtype is LOW


def test_regions_nest() -> None:
    """The inner policy wins for the ops it names, the outer one holds for others and comes back."""
    x, full = low(3, 4), torch.randn(3, 4)
    with region({"softmax": "fp32", "layer_norm": "lower_precision"}):
        with region({"softmax": "as_is"}):
            assert F.softmax(x, -1).dtype is LOW
            assert F.layer_norm(full, (4,)).dtype is LOW
            with amphal.autocast("cpu", dtype="bf16"):
                assert F.layer_norm(full, (4,)).dtype is LOW
            with amphal.autocast("cpu", enabled=False):
                assert F.layer_norm(full, (4,)).dtype is FULL
        assert F.softmax(x, -1).dtype is FULL
    assert F.softmax(x, -1).dtype is LOW


def test_an_inner_policy_can_return_an_op_to_the_device_s_own() -> None:
    """Naming the built-in policy in an inner region overrides the outer one."""
    x = torch.randn(2, 4)
    with region({"linear": "fp32"}), region({"linear": "lower_precision"}):
        assert F.linear(x, x).dtype is LOW


def test_whole_lists_take_the_place_of_the_device_s_own() -> None:
    """Under CUDA's lists, ops of the CPU's list that CUDA lacks are not cast."""
    x = low(4, 4)
    with region(op_lists("cuda")):
        assert F.layer_norm(x, (4,)).dtype is FULL
        assert x.exp().dtype is FULL
        assert x.sum().dtype is FULL
        assert x.norm().dtype is FULL
        assert x.norm(2, 1).dtype is FULL
        assert torch.stack([x, x.float()]).dtype is FULL  # torch's own type promotion
        assert F.max_pool2d(x[None], 2).dtype is LOW
        assert F.linear(x, x).dtype is LOW
        with pytest.raises(OpPolicyError, match="unsafe to autocast"):
            F.binary_cross_entropy(x.float().sigmoid(), x.float().sigmoid())
        assert x.softmax(-1, dtype=torch.float64).dtype is torch.float64
        assert torch.addcmul(x, x.float(), x).dtype is FULL


def test_one_region_is_reentered_and_decorates() -> None:
    """A region with a policy can be kept, nested in itself, recurse and decorate."""
    keep, x = region({"softmax": "fp32"}), low(3, 4)
    with keep, keep:
        assert F.softmax(x, -1).dtype is FULL

    @keep  # type: ignore[untyped-decorator]
    def count(n: int) -> torch.dtype:
        return count(n - 1) if n else F.softmax(x, -1).dtype

    assert count(3) is FULL
    assert _policy.active() is None
    assert isinstance(keep, torch.autocast)
    with pickle.loads(pickle.dumps(keep)):
        assert F.softmax(x, -1).dtype is FULL


def test_a_suspended_generator_keeps_its_policy_to_itself() -> None:
    """Regions that end in another order than they began restore what they should."""

    def hold() -> Any:
        with region({"softmax": "fp32"}):
            yield F.softmax(low(2, 2), -1).dtype

    first, second = hold(), hold()
    assert next(first) is next(second) is FULL
    first.close()
    assert F.softmax(low(2, 2), -1).dtype is FULL
    second.close()
    assert _policy.active() is None
    assert F.softmax(low(2, 2), -1).dtype is LOW


def test_nothing_is_left_behind() -> None:
    """After the last region the dispatcher, torch.library and the thread's state are as before."""
    dump = torch._C._dispatch_dump("aten::mse_loss")
    before = registered(), set(torch.library._impls), torch.is_autocast_enabled("ipu")
    with region({"softmax": "fp32", "mse_loss": "as_is"}):
        assert "aten::softmax.int" in registered()
    assert (registered(), set(torch.library._impls), torch.is_autocast_enabled("ipu")) == before
    assert torch._C._dispatch_dump("aten::mse_loss") == dump
    assert _policy.active() is None


def test_lists_are_the_device_s_own_also_within_a_region() -> None:
    """What a region changes for a while does not show in the lists of the device."""
    before = op_lists("cpu")
    with region({"softmax": "fp32", "mse_loss": "as_is"}):
        assert op_lists("cpu") == before


def test_nothing_is_left_behind_by_an_error() -> None:
    """An exception in the region, and one while validating it, leave nothing either."""
    before = registered()
    with pytest.raises(ZeroDivisionError), region({"softmax": "fp32"}):
        _ = 1 / 0
    with pytest.raises(OpPolicyError):
        region({"softmax": "fp32", "sofmax": "fp32"})
    assert registered() == before
    assert not torch.is_autocast_enabled("cpu")


def test_torch_does_not_warn_of_an_overridden_kernel() -> None:
    """Overriding a built-in kernel warns once a process in torch; here never, even if told to."""
    before = registered()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with region({"mse_loss": "as_is", "softmax": "fp32"}):
                assert registered() > before
    finally:
        torch.set_warn_always(False)


def test_a_thousand_cycles_leak_nothing() -> None:
    """Entering and leaving makes no object that stays."""
    ops = {"layer_norm": "lower_precision", "mse_loss": "as_is"}
    x = torch.randn(2, 2)

    def cycle(times: int) -> int:
        for _ in range(times):
            with region(ops):
                F.layer_norm(F.mse_loss(x, x, reduction="none"), (2,))
        gc.collect()
        return len(gc.get_objects())

    cycle(10)
    assert abs(cycle(1000) - cycle(10)) < 20


def test_a_thread_has_its_own_policy() -> None:
    """Two threads with opposite policies make 10,000 calls each, none under the other's."""
    x = low(2, 2)
    wrong: list[tuple[str, torch.dtype]] = []
    start = threading.Barrier(3)

    def run(policy: str, expected: torch.dtype) -> None:
        start.wait()
        for _ in range(500):
            with region({"softmax": policy}):
                wrong.extend((policy, d) for d in kinds(20) if d is not expected)

    def kinds(times: int) -> list[torch.dtype]:
        return [torch.softmax(x, -1).dtype for _ in range(times)]

    def plain() -> None:
        start.wait()
        with amphal.autocast("cpu", dtype="bf16"):
            wrong.extend(("none", d) for d in kinds(10_000) if d is not LOW)

    threads = [
        threading.Thread(target=run, args=("fp32", FULL)),
        threading.Thread(target=run, args=("lower_precision", LOW)),
        threading.Thread(target=plain),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_listed_op_keeps_torch_s_own_kernel_in_other_threads() -> None:
    """While one region changes mse_loss, a thread without a policy gets what torch does."""
    x, seen = low(2, 2), []

    def other() -> None:
        with amphal.autocast("cpu", dtype="bf16"):
            seen.append(F.mse_loss(x, x).dtype)

    with region({"mse_loss": "as_is"}):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert F.mse_loss(x, x).dtype is LOW
    assert seen == [FULL]


def test_a_region_that_is_off_has_no_policy() -> None:
    """enabled=False and float32 mean full precision whatever the ops say; they are checked."""
    with region({"softmax": "lower_precision"}, enabled=False):
        assert F.softmax(torch.randn(2, 2), -1).dtype is FULL
    with amphal.autocast("cpu", dtype="fp32", ops={"softmax": "lower_precision"}):
        assert F.softmax(torch.randn(2, 2), -1).dtype is FULL
    with pytest.raises(OpPolicyError):
        region({"sofmax": "fp32"}, enabled=False)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ({"sofmax": "fp32"}, "'softmax'"),
        ({"softmax": "fp23"}, "'fp32'"),
        ({"softmax.nope": "fp32"}, r"softmax\.int"),
        ({"relu": "promote"}, "one tensor"),
        ({"add_": "fp32"}, "writes into"),
        ({"view": "fp32"}, "view of"),
        ({"rand": "fp32"}, "no tensors"),
        ({"torchvison::nms": "fp32"}, "no op"),
    ],
)
def test_ops_that_make_no_sense_are_refused(ops: dict[str, str], message: str) -> None:
    """An unknown op or policy offers near names, and a senseless policy says why it is one."""
    with pytest.raises(OpPolicyError, match=message):
        region(ops)


@pytest.mark.parametrize("ops", ["softmax", ["softmax"], 3, {3: "fp32"}])
def test_ops_of_the_wrong_type_are_refused(ops: Any) -> None:
    """ops is a mapping of strings to strings, or an OpLists."""
    with pytest.raises(ArgumentTypeError):
        region(ops)


def test_lists_that_do_not_know_an_op_are_refused() -> None:
    """Unclassified ops have no policy to run under; the error names them."""
    with pytest.raises(OpPolicyError, match=r"softmax\.int"):
        region(amphal.OpLists(unclassified=frozenset(["softmax.int"])))
