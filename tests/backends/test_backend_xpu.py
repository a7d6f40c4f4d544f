"""Intel GPUs, with stand-ins for the driver; no device is needed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.stand_ins import Patch, answers, known, xpu_device

import amphal
from amphal import Hardware
from amphal.contract import ScalerSupport, get_backend
from amphal.errors import DeviceNotAvailableError, UnsupportedPrecisionError

XPU = get_backend("xpu")


def test_xpu_without_a_device_is_no(monkeypatch: Patch) -> None:
    """torch's XPU bf16 query has been True without a device; a build without a GPU is a "no"."""
    monkeypatch.setattr(torch.version, "xpu", "20250302", raising=False)
    monkeypatch.setattr(torch.xpu, "is_available", answers(False))
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", answers(True))
    monkeypatch.setenv("ZE_AFFINITY_MASK", "7")
    answer = XPU.available()
    assert not answer
    assert "sycl-ls" in answer.reason
    assert "ZE_AFFINITY_MASK='7'" in answer.reason
    with pytest.raises(DeviceNotAvailableError, match="sycl-ls"):
        amphal.detect("xpu", precision="bf16")


def test_a_torch_without_xpu_says_that_the_build_is_the_reason(monkeypatch: Patch) -> None:
    """A torch without XPU is told apart from a missing GPU."""
    monkeypatch.setattr(torch.version, "xpu", None, raising=False)
    assert "built without XPU" in XPU.available().reason


def test_the_xpu_probe_keeps_the_flags_that_are_true(monkeypatch: Patch) -> None:
    """Flags are kept in the driver's spelling; one that this torch doesn't know is left out."""
    xpu_device(monkeypatch, name="Intel(R) Arc(TM) Graphics", has_fp16=True, has_fp64=False)
    hardware = XPU.probe(None)
    assert hardware.flags == {"has_fp16"}
    assert (hardware.vendor, hardware.memory) == ("intel", 1 << 34)


def test_xpu_flags_that_are_false_by_mistake_do_not_hide_matrix_engines() -> None:
    """torch reports no bf16 on an Arc B580 where its offline compiler is missing; it is wrong."""
    bare = known("arc-b580")
    told = dataclasses.replace(
        bare, flags=bare.flags | {"has_subgroup_matrix_multiply_accumulate"}, name="new GPU"
    )
    for hardware in (bare, told):
        bf16 = XPU.dtypes(hardware)[torch.bfloat16]
        assert (bf16.level, bf16.accelerated) == ("native", True)


@pytest.mark.parametrize(
    ("name", "engines"),
    [
        ("Intel(R) Arc(TM) A380 Graphics", True),
        ("Intel(R) Arc(TM) Pro B60 Graphics", True),
        ("Intel(R) Arc(TM) 140T GPU (16GB)", True),
        ("Intel(R) Arc(TM) 130V GPU (8GB)", True),
        ("Intel(R) Data Center GPU Flex 170", True),
        ("Intel(R) Arc(TM) Graphics", False),
        ("Intel(R) Iris(R) Xe Graphics", False),
        ("Intel(R) UHD Graphics 770", False),
    ],
)
def test_xpu_products_with_matrix_engines_are_known_by_name(name: str, engines: bool) -> None:
    """Arc A and B, Arrow Lake-H, Lunar Lake, Flex and Max have XMX; Meteor Lake has none."""
    hardware = Hardware("xpu", name, flags=frozenset({"has_fp16"}))
    assert amphal.detect(hardware).dtype is (torch.bfloat16 if engines else torch.float16)


def test_xpu_bf16_without_matrix_engines_is_native_but_no_gain() -> None:
    """bf16 conversion alone makes bf16 native; without DPAS it isn't faster, and fp16 is."""
    flags = {"has_fp16", "has_bfloat16_conversions"}
    plan = amphal.detect(Hardware("xpu", "Intel(R) Graphics", flags=frozenset(flags)))
    assert plan.support[torch.bfloat16].level == "native"
    assert plan.dtype is torch.float16


def test_an_xpu_without_fp16_cannot_do_fp16() -> None:
    """Without the fp16 aspect kernels fail to run, so fp16 is absent there."""
    hardware = Hardware("xpu", "Intel(R) Graphics", flags=frozenset({"has_fp64"}))
    assert amphal.detect(hardware).dtype is torch.float32
    with pytest.raises(UnsupportedPrecisionError, match="no fp16"):
        amphal.detect(hardware, precision="fp16")


def test_arc_a_series_has_no_float64() -> None:
    """Arc A-series has no fp64, which torch's scaler and its fused kernels need; B-series has."""
    assert XPU.scaler(known("arc-a770")) == ScalerSupport(True, False, True, False)
    assert XPU.scaler(known("arc-b580")) == ScalerSupport(True, True, True, True)
