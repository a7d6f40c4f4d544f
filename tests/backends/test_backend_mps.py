"""Apple GPUs, with stand-ins for the machine; no Mac is needed."""

from __future__ import annotations

import platform
import subprocess

import pytest
import torch
from helpers.stand_ins import Patch, answers, known, mac, raises

import amphal
from amphal.contract import ScalerSupport, get_backend
from amphal.errors import UnsupportedPrecisionError

MPS = get_backend("mps")


def test_mps_says_what_is_missing(monkeypatch: Patch) -> None:
    """Not a Mac, not an MPS build, and no Metal device are three different reasons."""
    monkeypatch.setattr(platform, "system", answers("Linux"))
    assert MPS.available().reason == "Apple GPUs need macOS; this is Linux"
    mac(monkeypatch, "Apple M1", "14.5")
    assert MPS.available()
    monkeypatch.setattr(torch.backends.mps, "is_available", answers(False))
    assert "Metal device" in MPS.available().reason
    monkeypatch.setattr(torch.backends.mps, "is_built", answers(False))
    assert "built without MPS" in MPS.available().reason


@pytest.mark.parametrize(
    ("brand", "chip"),
    [("Apple M1 Pro", "M1"), ("Apple M4 Max", "M4"), ("Apple M12", "M12"), ("Apple A18 Pro", "")],
)
def test_the_mps_probe_reads_the_chip_and_the_macos_version(
    brand: str, chip: str, monkeypatch: Patch
) -> None:
    """The chip's generation comes from its name, and an unknown one is left empty."""
    mac(monkeypatch, brand, "15.3.1")
    hardware = MPS.probe(None)
    assert (hardware.name, hardware.architecture) == (brand, chip)
    assert (hardware.os, hardware.os_version) == ("darwin", (15, 3, 1))


def test_a_mac_whose_sysctl_fails_is_still_described(monkeypatch: Patch) -> None:
    """Without a brand string the chip is unknown, and bf16 is not chosen by itself."""
    mac(monkeypatch, "", "15.0")
    monkeypatch.setattr(subprocess, "run", raises(OSError("no sysctl")))
    hardware = MPS.probe(None)
    assert (hardware.name, hardware.architecture) == ("Apple GPU", "")
    assert amphal.detect(hardware).dtype is torch.float16


def test_a_python_that_is_told_macos_10_asks_torch(monkeypatch: Patch) -> None:
    """A Python built against an old SDK sees macOS 10.16 everywhere; torch knows the real one."""
    mac(monkeypatch, "Apple M3", "10.16")
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda a, b: (a, b) <= (14, 0))
    assert MPS.probe(None).os_version == (14, 0)


@pytest.mark.parametrize("chip", ["m1", "m2"])
def test_m1_and_m2_emulate_bf16(chip: str) -> None:
    """bf16 on M1 and M2 is emulated, although it runs; fp16 is preferred."""
    plan = amphal.detect(known(f"{chip}-macos14"))
    assert plan.support[torch.bfloat16].level == "emulated"
    assert (plan.dtype, plan.use_scaler) == (torch.float16, True)


@pytest.mark.parametrize("chip", ["M1", "M3"])
def test_bf16_before_macos_14_falls_back_to_fp16_and_says_why(chip: str) -> None:
    """bf16 raises TypeError at the first cast before macOS 14: it is absent, whatever the chip."""
    hardware = known("m1-macos13", architecture=chip)
    plan = amphal.detect(hardware)
    assert plan.dtype is torch.float16
    assert "needs macOS 14 (Metal 3.1), this is macOS 13.6" in plan.explain()
    with pytest.raises(UnsupportedPrecisionError, match="macOS 14"):
        amphal.detect(hardware, precision="bf16")


@pytest.mark.parametrize(
    ("version", "native", "fused"),
    [((2, 6), False, False), ((2, 7), False, False), ((2, 8), True, False), ((2, 13), True, True)],
)
def test_mps_scaler_kernels_came_with_torch(
    version: tuple[int, int], native: bool, fused: bool
) -> None:
    """The _amp_* kernels came with 2.8; fused optimizers heed found_inf from 2.13; never fp64."""
    assert MPS.scaler(known("m1-macos14", torch=version)) == ScalerSupport(
        native_kernels=native, fp64=False, detects_overflow=True, fused_optimizers=fused
    )
