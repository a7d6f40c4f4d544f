"""What holds for every backend: the built-in ones, and a plug-in's."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys
import tempfile
from types import ModuleType

import pytest
import torch
from helpers.stand_ins import Patch, answers, cuda_build, known, raises, xpu_device

import amphal
from amphal import Hardware, OpLists
from amphal.contract import (
    Availability,
    Backend,
    DtypeSupport,
    ScalerSupport,
    get_backend,
    register_backend,
    registered_backends,
    unregister_backend,
)
from amphal.errors import UnknownDeviceError, UnsupportedPrecisionError
from amphal.testing import simulate

CUDA, XPU, MPS, CPU = (get_backend(name) for name in ("cuda", "xpu", "mps", "cpu"))
BUILT_IN = (CUDA, XPU, MPS, CPU)


@pytest.mark.parametrize("backend", BUILT_IN, ids=lambda b: b.device_type)
def test_available_never_raises(backend: Backend, monkeypatch: Patch) -> None:
    """A driver that raises is a "no" that repeats what it said."""
    cuda_build(monkeypatch)
    monkeypatch.setattr(torch.version, "xpu", "20250302", raising=False)
    monkeypatch.setattr(platform, "system", answers("Darwin"))
    error = raises(OSError("libvendor.so.1: cannot open"))
    monkeypatch.setattr(torch.cuda, "is_available", error)
    monkeypatch.setattr(torch.xpu, "is_available", error)
    monkeypatch.setattr(torch.backends.mps, "is_available", error)
    answer = backend.available()
    assert isinstance(answer, Availability)
    assert answer.ok is (backend is CPU)
    assert answer.ok or "libvendor.so.1: cannot open" in answer.reason


@pytest.mark.parametrize("name", ["npu", "musa", "mlu", "auto", "no_such_device"])
def test_an_unknown_device_is_an_amphal_error_not_a_crash(name: str) -> None:
    """Asking for a plug-in that isn't installed says so, where torch raises RuntimeError."""
    assert name not in registered_backends()
    with pytest.raises(UnknownDeviceError, match="no backend is registered"):
        amphal.detect(name)


def test_one_registry_answers_for_a_device() -> None:
    """Frameworks disagree on one device; here every door leads to the same support."""
    hardware = known("m1-macos14", index=0)
    with simulate(hardware, priority=1000):
        plans = [amphal.detect(), amphal.detect("mps"), amphal.detect(torch.device("mps", 0))]
        declared = dict(get_backend("mps").dtypes(hardware))
    for plan in (*plans, amphal.detect(hardware)):
        assert {d: plan.support[d] for d in declared} == declared
        assert (plan.dtype, plan.use_scaler) == (torch.float16, True)


@pytest.mark.parametrize("backend", BUILT_IN, ids=lambda b: b.device_type)
def test_a_record_without_facts_is_never_trusted_with_low_precision(backend: Backend) -> None:
    """What is not known is not guessed: no bf16 by default on a device of unknown kind."""
    plan = amphal.detect(Hardware(backend.device_type, "a device from the future"))
    assert plan.dtype is not torch.bfloat16
    assert plan.support[torch.bfloat16].accelerated is False
    assert "known" in plan.support[torch.bfloat16].why


@pytest.mark.parametrize("backend", BUILT_IN, ids=lambda b: b.device_type)
def test_support_is_whole_on_an_empty_record(backend: Backend) -> None:
    """dtypes() answers for bf16 and fp16, and scaler() answers, whatever is missing."""
    hardware = Hardware(backend.device_type, "")
    assert set(backend.dtypes(hardware)) == {torch.bfloat16, torch.float16}
    assert isinstance(backend.scaler(hardware), ScalerSupport)


def test_importing_the_backends_imports_no_vendor_module_and_touches_no_device() -> None:
    """Loading all four backends leaves the devices uninitialised and vendor modules unimported."""
    code = (
        "import sys, torch, amphal; amphal.contract.registered_backends(); "
        "bad = {'intel_extension_for_pytorch', 'pynvml', 'amdsmi'} & set(sys.modules); "
        "assert not bad, bad; "
        "assert not torch.cuda.is_initialized() and not torch.xpu.is_initialized()"
    )
    command, folder = [sys.executable, "-c", code], tempfile.gettempdir()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["h100", "mi300x", "arc-b580", "m5-macos26", "epyc-zen4"])
def test_fused_optimizers_are_declared_only_where_torch_accepts_them(name: str) -> None:
    """A device with fused optimizers is one that this torch's own fused optimizers accept."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    plan = amphal.detect(known(name))
    accepted = plan.device.type in _get_fused_kernels_supported_devices()
    assert accepted or not plan.fused_optimizers


@pytest.mark.parametrize("backend", [CPU, XPU], ids=["cpu", "xpu"])
def test_ipex_is_seen_if_imported_and_never_imported(backend: Backend, monkeypatch: Patch) -> None:
    """An IPEX that the user imported is a flag of the device that it extends."""
    name = "intel_extension_for_pytorch"
    xpu_device(monkeypatch, name="Intel(R) Arc(TM) A770 Graphics", has_fp16=True)
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert "ipex" not in backend.probe(None).flags
    assert name not in sys.modules
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with_ipex = backend.probe(None)
    assert "ipex" in with_ipex.flags
    without = dataclasses.replace(with_ipex, flags=with_ipex.flags - {"ipex"})
    assert backend.dtypes(with_ipex) == backend.dtypes(without)


def saturating_backend() -> Backend:
    """Like an Ascend 910A: fp16 only, and an overflow gives the largest number, never inf."""
    return Backend(
        "npu",
        priority=70,
        available=lambda: Availability(True),
        probe=lambda index: Hardware("npu", "Ascend910A", index=index),
        dtypes=lambda hw: {
            torch.bfloat16: DtypeSupport("absent", False, "Ascend 910A has no bf16"),
            torch.float16: DtypeSupport("native", True, "cube units multiply it"),
        },
        op_lists=lambda dtype: OpLists(),
        scaler=lambda hw: ScalerSupport(False, False, False, False),
    )


def test_a_plug_in_answers_for_its_own_device_before_training_starts() -> None:
    """A 910A's bf16 is refused by detect(); its fp16 isn't chosen while no overflow can be seen."""
    backend = saturating_backend()
    register_backend(backend)
    try:
        plan = amphal.detect("npu")
        assert (plan.dtype, plan.use_scaler) == (torch.float32, False)
        assert "saturates" in plan.explain()
        with pytest.raises(UnsupportedPrecisionError, match="910A has no bf16"):
            amphal.detect("npu", precision="bf16")
        vendor = dataclasses.replace(backend, vendor_scaler=lambda: torch.amp.GradScaler)
        register_backend(vendor, replace=True)
        plan = amphal.detect("npu")
        assert (plan.dtype, plan.use_scaler) == (torch.float16, True)
    finally:
        unregister_backend("npu")
