"""NVIDIA and AMD GPUs, with stand-ins for the driver; no device is needed."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.stand_ins import Patch, answers, cuda_build, cuda_device, known

import amphal
from amphal import Hardware
from amphal.contract import get_backend
from amphal.errors import UnsupportedPrecisionError

CUDA = get_backend("cuda")


def test_a_torch_without_cuda_says_that_the_build_is_the_reason(monkeypatch: Patch) -> None:
    """A CPU build of torch is told apart from a missing GPU."""
    cuda_build(monkeypatch, cuda=None)
    answer = CUDA.available()
    assert not answer
    assert "built without CUDA or ROCm" in answer.reason
    assert "pytorch.org" in answer.reason


def test_a_cuda_build_without_a_device_says_where_to_look(monkeypatch: Patch) -> None:
    """A CUDA build with no GPU is a "no", and names the tool and the variable that can hide one."""
    cuda_build(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", answers(False))
    assert "nvidia-smi" in CUDA.available().reason
    assert "CUDA_VISIBLE_DEVICES" not in CUDA.available().reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "CUDA_VISIBLE_DEVICES='-1' is set" in CUDA.available().reason
    cuda_build(monkeypatch, cuda=None, hip="6.4")
    assert "AMD" in CUDA.available().reason


def test_a_driver_that_fails_to_start_is_quoted(monkeypatch: Patch) -> None:
    """torch warns of a driver error and says no; the reason is that warning, which isn't shown."""
    cuda_build(monkeypatch)

    def old_driver() -> bool:
        text = "CUDA initialization: The NVIDIA driver on your system is too old"
        warnings.warn(f"{text} (Triggered internally at CUDAFunctions.cpp:109.)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", old_driver)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer = CUDA.available()
    assert answer.reason.endswith("driver on your system is too old")


def test_the_cuda_probe_reads_the_compute_capability(monkeypatch: Patch) -> None:
    """An NVIDIA device is described by name, capability and memory."""
    cuda_device(
        monkeypatch, name="Tesla T4", major=7, minor=5, total_memory=15 << 30, gcnArchName="x"
    )
    hardware = CUDA.probe(None)
    assert (hardware.name, hardware.vendor) == ("Tesla T4", "nvidia")
    assert (hardware.capability, hardware.architecture) == ((7, 5), "")
    assert (hardware.memory, hardware.index) == (15 << 30, None)
    assert CUDA.probe(1).index == 1
    assert amphal.detect("cuda").dtype is torch.float16


def test_torch_saying_bf16_on_a_t4_is_not_believed(monkeypatch: Patch) -> None:
    """torch's bf16 query counts emulation and is True on a T4; bf16 is half fp32's rate there."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", answers(True))
    for name in ("t4", "rtx-2080", "gtx-1660"):
        plan = amphal.detect(known(name))
        assert (plan.dtype, plan.use_scaler) == (torch.float16, True)
        assert plan.support[torch.bfloat16].level == "emulated"
        assert plan.support[torch.bfloat16].accelerated is False


def test_a_precision_that_is_slow_here_is_obeyed_with_a_warning() -> None:
    """bf16 on a T4 is possible: a user who names it gets it, and is told."""
    with pytest.warns(amphal.PrecisionWarning, match="Tesla T4 .* emulated"):
        plan = amphal.detect(known("t4"), precision="bf16")
    assert (plan.dtype, plan.use_scaler) == (torch.bfloat16, False)
    assert "Asked for bf16 (precision='bf16')" in plan.explain()


@pytest.mark.parametrize("torch_says", [True, False])
def test_a_v100_is_the_same_on_every_torch(torch_says: bool, monkeypatch: Patch) -> None:
    """torch's bf16 answer for a V100 has changed with its version; this one does not."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", answers(torch_says))
    plans = {amphal.detect(known("v100", torch=v)).dtype for v in ((2, 6), (2, 9), (2, 13))}
    assert plans == {torch.float16}
    bf16 = CUDA.dtypes(known("v100"))[torch.bfloat16]
    assert (bf16.level, bf16.accelerated) == ("emulated", False)


def test_fp16_at_a_64th_of_the_rate_is_not_chosen() -> None:
    """GTX 10 and P40 have fp16 at 1/64 of fp32's rate: native, and no reason to use it."""
    for name in ("gtx-1080", "p40"):
        fp16 = CUDA.dtypes(known(name))[torch.float16]
        assert (fp16.level, fp16.accelerated) == ("native", False)
        assert "1/64" in fp16.why


def test_rocm_is_decided_by_architecture_not_by_torch(monkeypatch: Patch) -> None:
    """torch says bf16 on every ROCm device; on an RX 6600 (gfx1032) it can kill the process."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", answers(True))
    cuda_device(
        monkeypatch,
        hip="6.4",
        name="AMD Radeon RX 6600",
        major=10,
        minor=3,
        total_memory=8 << 30,
        gcnArchName="gfx1032",
    )
    hardware = CUDA.probe(0)
    assert (hardware.vendor, hardware.architecture) == ("amd", "gfx1032")
    assert hardware.capability is None, "ROCm's major and minor are no compute capability"
    assert CUDA.dtypes(hardware)[torch.bfloat16].level == "absent"
    assert amphal.detect(hardware).dtype is torch.float16
    with pytest.raises(UnsupportedPrecisionError, match=r"LLVM.*It can do: fp16, fp32"):
        amphal.detect(hardware, precision="bf16")


def test_the_modes_of_a_rocm_architecture_are_dropped(monkeypatch: Patch) -> None:
    """gcnArchName carries modes (sramecc, xnack); the architecture is the part before them."""
    cuda_device(
        monkeypatch,
        hip="6.4",
        name="AMD Instinct MI250X",
        major=9,
        minor=0,
        total_memory=64 << 30,
        gcnArchName="gfx90a:sramecc+:xnack-",
    )
    hardware = CUDA.probe(0)
    assert hardware.architecture == "gfx90a"
    assert amphal.detect(hardware).dtype is torch.bfloat16


def test_an_unknown_amd_architecture_says_so_and_takes_fp16() -> None:
    """bf16 on an architecture that nobody has described is used only if the user names it."""
    hardware = Hardware("cuda", "Radeon RX 19900", vendor="amd", architecture="gfx1999")
    plan = amphal.detect(hardware)
    assert plan.dtype is torch.float16
    assert "gfx1999" in plan.support[torch.bfloat16].why
