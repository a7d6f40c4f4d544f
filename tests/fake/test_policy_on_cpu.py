"""One device's casting policy on another: CUDA's, XPU's and MPS's on the CPU, op by op."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import amphal
from amphal._torch import private as _compat
from amphal._torch.nested import tensors_in
from amphal.contract import op_names as _opnames
from amphal.testing import _observe, observe_policy
from amphal.testing._observe import observe_in

pytestmark = pytest.mark.fake

# The CPU has none of these on which they could be observed.
NOT_OBSERVED = {"_cudnn_rnn"}


def on_cpu(lists: amphal.OpLists) -> torch.autocast:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        return amphal.autocast("cpu", dtype="bf16", ops=lists)


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_every_op_is_cast_on_the_cpu_as_on_the_device(device: str) -> None:
    """Under ``ops=op_lists(device)`` the CPU casts each op as fake tensors of the device show."""
    lists = amphal.op_lists(device)
    ops = {op for op, _ in (*lists, *amphal.op_lists("cpu"))} - NOT_OBSERVED
    region = functools.partial(on_cpu, lists)
    different = {}
    with region():  # the kernels stay between the observations, which saves most of the time
        for op in sorted(ops):
            there = observe_policy(device, op)
            here = observe_in(region, "cpu", _opnames.op_overload(op), torch.bfloat16)
            if here != there:
                different[op] = (there, here)
    assert different == {}
    assert len(ops) > 150


def test_a_kernel_calls_exactly_the_op_that_it_stands_for() -> None:
    """The fast way to call an op reaches the same overload with the same arguments."""
    different = []
    ops = {op for op in _compat._GENERATED if _opnames.is_defined(op)}
    assert len(ops) > 30
    for name in sorted(ops):
        op = _opnames.op_overload(name)
        seen = []
        for call in (op._op, _compat.caller(op)):
            with FakeTensorMode(), torch.inference_mode():
                args, kwargs = _observe._arguments(op, "cpu", itertools.cycle([torch.float32]))
                func, got, more = _observe.seen_by(op, call, args, kwargs)
            given = dict(zip((a.name for a in op._schema.arguments), got, strict=False), **more)
            defaults = {a.name: a.default_value for a in op._schema.arguments}
            plain = {n: v for n, v in given.items() if not list(tensors_in(v))}
            seen.append((func, {**defaults, **plain}))
        if seen[0] != seen[1]:
            different.append((name, seen))
    assert different == []


def test_without_the_policy_the_cpu_casts_otherwise() -> None:
    """The comparison can fail: the CPU's own policy differs in well over a hundred ops."""
    assert len(amphal.op_lists("cpu").diff(amphal.op_lists("cuda"))) > 100
    softmax = _opnames.op_overload("softmax.int")
    own = observe_in(lambda: on_cpu(amphal.op_lists("cpu")), "cpu", softmax, torch.bfloat16)
    assert own == "as_is"
    assert observe_policy("cuda", "softmax") == "fp32_set_opt_dtype"
