"""The CPU, by flags that are stand-ins; this machine's own are only read."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers.stand_ins import Patch, known, raises

import amphal
from amphal import Hardware
from amphal.contract import ScalerSupport, get_backend, registered_backends

CPU = get_backend("cpu")


XEON = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8488C
flags\t\t: fpu sse2 avx avx2 avx512f avx512bw avx_vnni avx512_bf16 avx512_vnni amx_bf16 \
avx512_fp16 amx_tile amx_int8

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
PI5 = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm aes pmull crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc asimddp
CPU implementer\t: 0x41
"""


def test_there_is_always_a_cpu() -> None:
    """The CPU is available and of the lowest priority: it is the fallback."""
    assert CPU.available()
    others = [r.backend for r in registered_backends().values() if r.backend]
    assert min(b.priority for b in others) == CPU.priority


def test_the_cpu_flags_have_one_spelling() -> None:
    """Linux's and torch's names for a flag become one: a decision doesn't depend on the reader."""
    from amphal.backends import cpu

    name, flags = cpu._from_linux(XEON)
    assert name == "Intel(R) Xeon(R) Platinum 8488C"
    assert flags == known("sapphire-rapids").flags
    assert cpu._from_linux(PI5) == ("", known("raspberry-pi-5").flags)
    capabilities = {**dict.fromkeys(flags, True), "amx_fp16": False, "cpu_name": name, "l2": 1}
    assert cpu._from_torch(capabilities) == (name, flags)


def test_an_older_torch_reads_the_same_flags(monkeypatch: Patch) -> None:
    """Without torch.cpu.get_capabilities() (before 2.11) /proc/cpuinfo tells Linux the same."""
    here = CPU.probe(None).flags
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    on_linux = sys.platform.startswith("linux")
    assert bool(here) or not on_linux
    assert CPU.probe(None).flags == (here if on_linux else frozenset())


def test_a_cpu_that_nobody_describes_runs_fp32_and_says_why(monkeypatch: Patch) -> None:
    """Without any reader the flags are unknown, which is said, and low precision isn't chosen."""
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr("builtins.open", raises(FileNotFoundError("/proc/cpuinfo")))
    hardware = CPU.probe(None)
    assert hardware.flags == frozenset()
    plan = amphal.detect(hardware)
    assert plan.dtype is torch.float32
    assert "flags are unknown" in plan.explain()


@pytest.mark.parametrize("name", ["core-i7-13700k", "skylake-xeon", "ice-lake", "epyc-zen3"])
def test_bf16_on_a_cpu_without_its_instructions_is_not_chosen_and_warns(name: str) -> None:
    """Autocast to bf16 is slower than fp32 without AVX512_BF16 or AMX; torch says nothing."""
    assert amphal.detect(known(name)).dtype is torch.float32
    with pytest.warns(amphal.PrecisionWarning, match="slower than fp32"):
        amphal.detect(known(name), precision="bf16")


def test_fp16_on_a_cpu_needs_amx_fp16() -> None:
    """AVX512_FP16 alone did not speed a matmul up: fp16 counts with AMX-FP16 only, after bf16."""
    plain, tiles = known("sapphire-rapids"), known("granite-rapids")
    assert CPU.dtypes(plain)[torch.float16].level == "native"
    assert CPU.dtypes(plain)[torch.float16].accelerated is False
    assert CPU.dtypes(tiles)[torch.float16].accelerated is True
    assert amphal.detect(tiles).dtype is torch.bfloat16
    only_fp16 = dataclasses.replace(tiles, flags=frozenset({"sse2", "amx_fp16"}))
    assert amphal.detect(only_fp16).dtype is torch.float16


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16"])
def test_either_instruction_set_makes_bf16_native(flag: str) -> None:
    """AVX512_BF16 (Cooper Lake, Zen 4) or AMX is enough for bf16."""
    hardware = Hardware("cpu", "x", architecture="x86_64", flags=frozenset({"sse2", flag}))
    assert amphal.detect(hardware).dtype is torch.bfloat16


def test_arm_bf16_counts_where_torch_has_kernels_for_it() -> None:
    """Linux on Arm multiplies bf16 through oneDNN; torch on macOS has none."""
    linux = known("graviton3")
    assert amphal.detect(linux).dtype is torch.bfloat16
    assert amphal.detect(dataclasses.replace(linux, os="darwin")).dtype is torch.float32


def test_what_the_cpu_scaler_declares_is_true_here() -> None:
    """The _amp_* kernels run on the CPU, and fused optimizers heed grad_scale and found_inf."""
    assert CPU.scaler(CPU.probe(None)) == ScalerSupport(True, True, True, True)
    grad, found = torch.tensor([4.0, float("inf")]), torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.tensor(0.5))
    assert (found.item(), grad[0].item()) == (1.0, 2.0)

    def step(found_inf: float) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.full((2,), 8.0)
        optimizer: Any = torch.optim.SGD([weight], lr=1.0, fused=True)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(found_inf)
        optimizer.step()
        return weight.detach()

    assert torch.equal(step(found_inf=1.0), torch.ones(2))
    assert torch.equal(step(found_inf=0.0), torch.full((2,), -1.0))


def test_medium_matmuls_are_declared_for_who_multiplies_bf16() -> None:
    """oneDNN's bf16 inside float32 matmuls, with AMX alone; not with AVX512_BF16, not on Arm."""
    xeon = Hardware("cpu", "x", architecture="x86_64", flags=frozenset({"amx_bf16"}))
    assert list(CPU.float32_matmul(xeon)) == ["medium"]
    for flags in ({"avx2"}, {"avx512_f", "avx512_bf16", "avx512_fp16"}):
        assert CPU.float32_matmul(dataclasses.replace(xeon, flags=frozenset(flags))) == {}
    assert CPU.float32_matmul(known("graviton3")) == {}


MEASURE = """
import torch
torch.manual_seed(0)
off = 0.0
for rows, inner, columns in ((64, 256, 64), (256, 256, 256), (1, 512, 512)):
    a, b = torch.rand(rows, inner), torch.rand(inner, columns)
    torch.set_float32_matmul_precision("highest")
    exact = a @ b
    torch.set_float32_matmul_precision("medium")
    off = max(off, float(((a @ b - exact) / exact).abs().max()))
print(off)
"""


@pytest.mark.parametrize("limit", [None, "AVX512_CORE_BF16", "AVX2"])
def test_what_is_declared_of_medium_matmuls_is_so_here(limit: str | None) -> None:
    """bf16 products are some 1e-3 off, and only where that is declared; rounding is below 1e-5.

    ``limit`` is the highest instruction set that oneDNN may use, so an AMX machine also shows what
    one without AMX does.
    """
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": limit or "DEFAULT"}
    result = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, env=environment, check=True
    )
    declared = "medium" in CPU.float32_matmul(CPU.probe(None)) and limit is None
    assert (1e-5 < float(result.stdout) < 1e-2) == declared
