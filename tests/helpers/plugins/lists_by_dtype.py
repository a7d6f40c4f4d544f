"""Kernels made of lists that differ between dtypes; run by test_plugins_device.py in a process."""

from __future__ import annotations

import pytest
import torch

import amphal
from amphal import OpLists
from amphal.contract import register_backend, unregister_backend
from amphal.errors import BackendError
from amphal.testing import FakeBackend, install_device

install_device("toy")


def test_lists_that_make_no_sense_are_an_error_that_names_the_backend() -> None:
    """A policy that an op cannot have is refused when kernels are made of it."""
    register_backend(FakeBackend("toy", op_lists=OpLists(fp32_set_opt_dtype=frozenset({"mm"}))))
    try:
        with pytest.raises(BackendError, match=r"'toy' declares 'mm'.*no optional dtype"):
            amphal.autocast("toy", dtype="bf16")
    finally:
        unregister_backend("toy")


def test_lists_may_differ_between_the_dtypes() -> None:
    """A region casts by the lists of its own dtype, whichever dtype the first region had."""
    shared = {"mm", "matmul", "linear"}

    def lists(dtype: torch.dtype) -> OpLists:
        one, other = ("exp", "log") if dtype is torch.bfloat16 else ("log", "exp")
        return OpLists(lower_precision=frozenset(shared | {other}), fp32=frozenset({one}))

    register_backend(FakeBackend("toy", op_lists=lists))
    try:
        x = torch.ones(2, 2, device="toy")
        for dtype, one, other in (
            (torch.bfloat16, torch.exp, torch.log),
            (torch.float16, torch.log, torch.exp),
        ):
            with amphal.autocast("toy", dtype=dtype):
                assert (x @ x).dtype is dtype
                assert one(x.to(dtype)).dtype is torch.float32
                assert other(x).dtype is dtype
            assert not amphal.op_lists("toy", dtype).unclassified
    finally:
        unregister_backend("toy")
