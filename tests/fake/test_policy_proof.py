"""The declared casting tables against the live dispatcher and against observation.

A torch that changes a list fails here, and the assertion shows the ops and both policies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import amphal
from amphal._casting import live_lists as _ops
from amphal.backends import _lists
from amphal.contract import op_names as _opnames
from amphal.contract.records import torch_version
from amphal.errors import OpPolicyError
from amphal.testing import _observe, observe_policy, simulate

pytestmark = pytest.mark.fake

TABLES = {
    "cuda": _lists.cuda,
    "xpu": _lists.xpu,
    "mps": _lists.mps,
    "mtia": _lists.mtia,
    "cpu": _lists.cpu,
}
if torch_version() < (2, 7):
    del TABLES["mtia"]  # it has no autocast there

# What cannot be observed on fake tensors, and why.
EXCEPTIONS = {
    ("cuda", "_cudnn_rnn"): "its autocast kernel flattens the weights anew, which needs cuDNN",
}


@pytest.mark.parametrize("device", TABLES)
def test_declared_names_are_those_of_the_live_dispatcher(device: str) -> None:
    """Every declared op that this torch defines is on the autocast key, and nothing else is."""
    declared = dict(TABLES[device](torch.bfloat16))
    live = _ops.listed_live(device)
    # An extension's own ops, and what it adds to torch's, come with the extension; a vendor's
    # library with the build.
    added = _lists.FROM_EXTENSIONS | _lists.FROM_BUILDS
    expected = {op for op in declared if _opnames.is_defined(op) and op not in added}
    lists = _ops.reconcile(TABLES[device](torch.bfloat16), live)
    assert sorted(lists.unclassified) == []
    assert sorted(expected - live) == []


@pytest.mark.parametrize("device", TABLES)
def test_declared_policies_are_the_observed_ones(device: str) -> None:
    """Autocast does to fake tensors of the device what the table says, for every op on the key."""
    lists = _ops.reconcile(TABLES[device](torch.bfloat16), _ops.listed_live(device))
    different = {}
    for op, policy in lists:
        if (device, op) in EXCEPTIONS:
            continue
        try:
            observed = observe_policy(device, op)
        except OpPolicyError as exc:
            observed = str(exc)
        if observed != policy:
            different[op] = f"declared {policy}, observed {observed}"
    assert different == {}
    assert len(lists) > 90


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps", "cpu"])
def test_nothing_is_unclassified(device: str) -> None:
    """The tables know every op that the live dispatcher casts."""
    assert amphal.op_lists(device).unclassified == frozenset()


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps", "cpu"])
def test_the_policy_does_not_depend_on_the_low_dtype(device: str) -> None:
    """fp16 and bf16 regions have the same lists, and a few ops are observed in fp16 too."""
    assert amphal.op_lists(device, "fp16") == amphal.op_lists(device, "bf16")
    for op in ("linear", "mse_loss"):
        assert observe_policy(device, op, "fp16") == amphal.op_lists(device).policy(op)


@pytest.mark.parametrize(("device", "op"), EXCEPTIONS)
def test_an_exception_really_cannot_be_observed(device: str, op: str) -> None:
    """An op is excused only while observing it fails; it is as_is in a build that lacks it."""
    try:
        observed = observe_policy(device, op)
    except OpPolicyError:
        observed = "refused"
    assert observed == ("refused" if op in _ops.listed_live(device) else "as_is")


def test_a_vendors_rnn_is_listed_in_its_build_alone() -> None:
    """cuDNN's kernel is there in a build for CUDA, MIOpen's in one for ROCm, on no other key."""
    listed = {op for device in TABLES for op in _ops.listed_live(device)}
    cuda, rocm = torch.version.cuda is not None, torch.version.hip is not None
    assert ("_cudnn_rnn" in listed, "miopen_rnn" in listed) == (cuda, rocm)


def rnn_dtypes(region: Callable[[], Any]) -> set[torch.dtype]:
    """The dtypes that cuDNN gets in this region for float32 inputs and weights in float16."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, device="cuda", dtype=dtype)

    op = torch.ops.aten._cudnn_rnn.default
    gru = 3
    rest: Any = (0, 1, False, 0.0, False, False, [], None)
    with FakeTensorMode(), torch.inference_mode():
        # With weights in float16 there is nothing to flatten, which would take a GPU.
        weights = [empty(12, 4, dtype=torch.float16), empty(12, 3, dtype=torch.float16)]
        args = (empty(5, 2, 4), weights, 2, None, empty(1, 2, 3), None, gru, 3, *rest)
        with region():
            return set(_observe._tensor_dtypes(_observe.seen_by(op, op, args, {})))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_cudnn_gets_an_rnn_in_fp16_from_every_region(low: torch.dtype) -> None:
    """Its kernel casts to float16 in a bf16 region too; a build without it casts nothing."""
    seen = rnn_dtypes(lambda: _observe._region("cuda", low))
    fp16, fp32 = torch.float16, torch.float32
    assert seen == ({fp16} if "_cudnn_rnn" in _ops.listed_live("cuda") else {fp16, fp32})


def test_a_policy_keeps_an_rnn_of_cudnn_in_fp32() -> None:
    """``ops={"_cudnn_rnn": "fp32"}`` is what to say where that fp16 has no loss scale."""
    ops = {"_cudnn_rnn": "fp32"}
    with simulate(amphal.known_hardware()["h100"].hardware):
        assert rnn_dtypes(lambda: amphal.autocast("cuda", "bf16", ops=ops)) == {torch.float32}


def test_an_op_that_is_not_listed_is_as_is() -> None:
    """Observation can tell: an op that autocast passes by keeps its inputs' dtypes."""
    assert observe_policy("cpu", "softmax.int") == "as_is"
    assert observe_policy("cuda", "add.Tensor") == "as_is"


def test_observation_follows_a_changed_kernel() -> None:
    """The proof can fail: another kernel on the key is seen, and a table that is wrong is told."""
    library = torch.library.Library("aten", "IMPL")

    def softmax(x, dim, dtype=None):  # type: ignore[no-untyped-def]
        with torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
        ):
            return torch.softmax(x.float(), dim, dtype)

    library.impl("softmax.int", softmax, "AutocastCPU")
    try:
        assert observe_policy("cpu", "softmax.int") == "fp32"
        assert amphal.op_lists("cpu").unclassified == {"softmax.int"}
    finally:
        library._destroy()
    assert observe_policy("cpu", "softmax.int") == "as_is"


def test_observing_leaves_autocast_as_it_was() -> None:
    """Neither the state nor the dtype of the observed device changes."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    observe_policy("cuda", "mm")
    assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == before
    assert not torch.is_autocast_enabled("cpu")
