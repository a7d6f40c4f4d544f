"""Casting policies beside other threads, registrations, interrupts and exits out of order."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import amphal
from amphal import OpLists, op_lists
from amphal._autocast import arguments as argument_rules
from amphal._autocast import policy_region as _policy_region
from amphal._casting import installed as _registration
from amphal._casting import policy as _policy
from amphal.errors import ArgumentTypeError, AutocastStateError, OpPolicyError

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


def has_kernel(op: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", KEY)


@contextlib.contextmanager
def bystander() -> Iterator[None]:
    """A thread that waits."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_kernel_that_was_added_stays_while_another_thread_runs() -> None:
    """Taking it away would kill a call that is on its way; it does nothing, and goes later."""
    x = torch.randn(2, 2)
    with bystander():
        with region({"softmax": "lower_precision", "mse_loss": "as_is"}):
            assert F.softmax(x, -1).dtype is LOW
        assert has_kernel("softmax.int")
        assert _policy.active() is None
        assert "softmax.int" not in op_lists("cpu")
        with torch.autocast("cpu", dtype=LOW):
            assert F.softmax(x, -1).dtype is FULL
        with region({"softmax": "lower_precision"}):
            assert F.softmax(x, -1).dtype is LOW
    with region({"mse_loss": "as_is"}):
        pass
    assert not has_kernel("softmax.int")


def test_the_kernel_of_a_rule_stays_while_another_thread_runs() -> None:
    """A removed rule casts no longer at once, and can be registered anew."""
    x = torch.randn(2, 2)
    with bystander():
        amphal.register_autocast_op("relu", "lower_precision", "cpu").remove()
        assert has_kernel("relu")
        assert "relu" not in op_lists("cpu")
        with torch.autocast("cpu", dtype=LOW):
            assert torch.relu(x).dtype is FULL
        again = amphal.register_autocast_op("relu", "lower_precision", "cpu")
        assert op_lists("cpu").policy("relu") == "lower_precision"
        with torch.autocast("cpu", dtype=LOW):
            assert torch.relu(x).dtype is LOW
        again.remove()
    with region({"mse_loss": "as_is"}):
        pass
    assert not has_kernel("relu")


def test_a_rule_is_seen_by_regions_that_were_made_before_it() -> None:
    """The lists that a policy is held against are those of now, after register and remove."""
    x = torch.randn(2, 2)
    keep, whole = region({"relu": "as_is"}), region(op_lists("cuda"))
    lowers, plain = region({"relu": "lower_precision"}), region({"mse_loss": "as_is"})
    for each in (keep, whole, lowers, plain):
        with each:
            torch.relu(x)
    rule = amphal.register_autocast_op("relu", "lower_precision", "cpu")
    try:
        for each, dtype in ((keep, FULL), (whole, FULL), (lowers, LOW), (plain, LOW)):
            with each:
                assert torch.relu(x).dtype is dtype
        with region({"relu": "as_is"}):
            assert torch.relu(x).dtype is FULL
    finally:
        rule.remove()
    for each, dtype in ((keep, FULL), (whole, FULL), (lowers, LOW), (plain, FULL)):
        with each:
            assert torch.relu(x).dtype is dtype


def test_leaving_a_region_that_was_not_entered_is_an_error() -> None:
    """Twice, never or in another thread: AutocastStateError, as for a region without ops."""
    keep = region({"softmax": "fp32"})
    with pytest.raises(AutocastStateError):
        keep.__exit__()
    with keep:
        pass
    with pytest.raises(AutocastStateError):
        keep.__exit__()
    seen: list[BaseException] = []

    def other() -> None:
        try:
            keep.__exit__()
        except AutocastStateError as error:
            seen.append(error)

    with keep:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(seen) == 1
        assert F.softmax(torch.randn(2, 2).to(LOW), -1).dtype is FULL
    assert not torch.is_autocast_enabled("cpu")


def test_an_interrupt_while_kernels_are_put_undoes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle leaves no kernel and no count, so the next entry works."""
    ops, x = {"softmax": "lower_precision", "tanh": "lower_precision"}, torch.randn(2, 2)
    before = torch._C._dispatch_get_registrations_for_dispatch_key(KEY)
    real = _registration.Kernels.put

    def interrupted(self: Any) -> None:
        whole = self._kernels
        if len(whole) < 2:
            return real(self)

        def stop(*args: Any) -> None:
            raise KeyboardInterrupt

        self._kernels = [whole[0], (stop, *whole[1][1:]), *whole[2:]]
        try:
            real(self)
        finally:
            self._kernels = whole

    with monkeypatch.context() as patch:
        patch.setattr(_registration.Kernels, "put", interrupted)
        with pytest.raises(KeyboardInterrupt), region(ops):
            pass
    assert set(torch._C._dispatch_get_registrations_for_dispatch_key(KEY)) == set(before)
    assert _policy.active() is None
    assert not torch.is_autocast_enabled("cpu")
    with region(ops):
        assert F.softmax(x, -1).dtype is LOW
        assert torch.tanh(x).dtype is LOW
    assert set(torch._C._dispatch_get_registrations_for_dispatch_key(KEY)) == set(before)


def test_exits_out_of_order_leave_no_function_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a region shows itself as a mode (torch 2.6), its own mode is the one that goes."""
    monkeypatch.setattr(amphal._torch.private, "dynamo_guards_on_autocast", lambda: False)
    monkeypatch.setitem(__import__("sys").modules, "torch._dynamo", torch)
    first, second = region({"selu": "fp32"}), region({"elu": "fp32"})
    first.__enter__()
    second.__enter__()
    stack = torch.overrides._get_current_function_mode_stack
    assert len(stack()) == 2
    first.__exit__()
    assert [mode.index for mode in stack()] == [second.index]
    second.__exit__()
    assert stack() == []


def test_flags_are_compared_by_identity() -> None:
    """1 equals True, is no flag, and does not find the region that True has made."""
    region({"softmax": "fp32"}, enabled=True)
    with pytest.raises(ArgumentTypeError):
        region({"softmax": "fp32"}, enabled=1)
    with pytest.raises(ArgumentTypeError):
        region({"softmax": "fp32"}, cache_enabled=0)


def test_every_device_s_own_lists_are_accepted() -> None:
    """The checks of whole lists refuse nothing that torch does itself."""
    for device in ("cpu", "cuda", "mps", "xpu"):
        assert isinstance(region(op_lists(device)), torch.autocast)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (OpLists(fp32=frozenset(["sofmax"])), "'softmax'"),
        (OpLists(fp32=frozenset(["softmax.nope"])), r"softmax\.int"),
        (OpLists(lower_precision=frozenset(["add_.Tensor"])), "writes into"),
        (OpLists(fp32_append_dtype=frozenset(["mm"])), "overload that takes a dtype"),
        (OpLists(fp32_set_opt_dtype=frozenset(["mm"])), "no optional dtype"),
    ],
)
def test_lists_made_by_hand_are_checked(lists: OpLists, message: str) -> None:
    """A typo and a policy that makes no sense are refused in whole lists as in a mapping."""
    with pytest.raises(OpPolicyError, match=message):
        region(lists)


def test_names_in_lists_made_by_hand() -> None:
    """A bare name means all overloads if there is no unnamed one; unloaded extensions are none."""
    lists = OpLists(
        fp32=frozenset(["softmax", "aten::bmm", "mm.default"]),
        promote=frozenset(["not_loaded::op"]),
    )
    assert lists.fp32 == {"softmax", "bmm", "mm"}
    with region(lists):
        assert F.softmax(torch.randn(2, 2).to(LOW), -1).dtype is FULL


def test_a_prefix_and_torch_s_name_of_the_unnamed_overload_are_understood() -> None:
    """aten:: says nothing, and mm.default is mm alone."""
    assert op_lists("cuda").policy("aten::softmax.int") == "fp32_set_opt_dtype"
    assert op_lists("cuda").policy("aten::softmax") == "fp32_set_opt_dtype"
    assert op_lists("cuda").policy("mm.default") == "lower_precision"
    x = torch.randn(2, 2)
    with region({"mm.default": "fp32"}):
        assert torch.mm(x, x).dtype is FULL


@pytest.mark.parametrize("op", ["einsum", "index.Tensor", "eq", "dequantize", "copy"])
def test_overloads_of_torchscript_alone_are_left_out(op: str) -> None:
    """A bare name with overloads that only TorchScript has means those of the dispatcher."""
    assert region({op: "fp32"}).fast_dtype is LOW


@pytest.mark.parametrize("op", ["mm.", "", ".", "aten::", "::", "a::b::c", "einsum.sublist"])
def test_names_that_are_none_are_refused(op: str) -> None:
    """Odd names are errors of amphal's, not of torch's."""
    with pytest.raises(OpPolicyError, match="has no op"):
        region({op: "fp32"})


@pytest.mark.parametrize("again", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_regions_are_copied_and_pickled(again: Any) -> None:
    """With whole lists and with a mapping, overload by overload."""
    x = torch.randn(2, 2)
    with again(region(op_lists("cuda"))):
        assert F.softmax(x.to(LOW), -1).dtype is FULL
    exact = again(region({"mm.default": "fp32"}))
    assert dict(exact.policy.table) == {"mm": "fp32"}


def test_ops_where_the_plan_is_full_precision_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ops= without a dtype on hardware that is best in float32 does nothing, and says so."""
    _policy_region._tell_of_no_effect.cache_clear()
    monkeypatch.setattr(argument_rules, "settled", lambda *args: ("cpu", LOW, False))
    with pytest.warns(amphal.PrecisionWarning, match="ops= has no effect.*dtype='bf16'"):
        amphal.autocast("cpu", ops={"softmax": "fp32"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amphal.autocast("cpu", ops={"softmax": "fp32"})
    _policy_region._tell_of_no_effect.cache_clear()


def test_an_op_of_a_library_that_is_not_loaded_says_so() -> None:
    """A name whose namespace torch has never heard of is no typo: its library is missing."""
    with pytest.raises(OpPolicyError, match="Nothing of 'absent' is loaded: import what defines"):
        amphal.autocast("cpu", "bf16", ops={"absent::nms": "fp32"})
    with pytest.raises(OpPolicyError, match="has no op 'sofmax'") as typo:
        amphal.autocast("cpu", "bf16", ops={"sofmax": "fp32"})
    assert "is loaded" not in str(typo.value)
