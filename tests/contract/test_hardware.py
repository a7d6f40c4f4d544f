"""Known hardware: the facts are in ``amphal/data/hardware.toml``, the expectations are here."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import subprocess
import sys
import tempfile
from importlib import resources

import pytest
import torch

import amphal
from amphal import Hardware

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BF16 = (torch.bfloat16, False)
FP16 = (torch.float16, True)
FP32 = (torch.float32, False)

# The decision for each row by name: the dtype, and whether the scaler is on.
EXPECTED = {
    # NVIDIA: bf16 from compute capability 8.0 on, fp16 where it is faster than fp32.
    "k80": FP32,
    "gtx-750-ti": FP32,
    "m60": FP32,
    "jetson-nano": FP16,
    "p100": FP16,
    "gtx-1080": FP32,
    "p40": FP32,
    "jetson-tx2": FP16,
    "v100": FP16,
    "jetson-xavier": FP16,
    "gtx-1660": FP16,
    "rtx-2080": FP16,
    "t4": FP16,
    "a100": BF16,
    "rtx-3090": BF16,
    "jetson-orin": BF16,
    "rtx-4090": BF16,
    "l4": BF16,
    "h100": BF16,
    "h200": BF16,
    "b200": BF16,
    "rtx-5090": BF16,
    # AMD: bf16 on CDNA and from RDNA3 on.
    "vega-64": FP16,
    "mi50": FP16,
    "radeon-vii": FP16,
    "mi100": BF16,
    "mi250": BF16,
    "mi300x": BF16,
    "mi350x": BF16,
    "rx-5700": FP16,
    "rx-6600": FP16,
    "rx-6800": FP16,
    "rx-7900-xtx": BF16,
    "radeon-8060s": BF16,
    "rx-9070": BF16,
    # Intel GPUs: bf16 with XMX matrix engines.
    "arc-a770": BF16,
    "arc-b580": BF16,
    "arc-pro-b60": BF16,
    "max-1550": BF16,
    "iris-xe": FP16,
    "meteor-lake": FP16,
    "lunar-lake": BF16,
    # Apple GPUs: bf16 from M3 on.
    "m1-macos13": FP16,
    "m1-macos14": FP16,
    "m1-macos15": FP16,
    "m2-macos13": FP16,
    "m2-macos14": FP16,
    "m2-macos15": FP16,
    "m3-macos14": BF16,
    "m3-macos15": BF16,
    "m4-macos15": BF16,
    "m4-macos26": BF16,
    "m5-macos26": BF16,
    # CPUs: bf16 with AVX512_BF16, AMX, or Arm's BF16 under oneDNN.
    "core-2-duo": FP32,
    "skylake-xeon": FP32,
    "cascade-lake": FP32,
    "ice-lake": FP32,
    "cooper-lake": BF16,
    "sapphire-rapids": BF16,
    "emerald-rapids": BF16,
    "granite-rapids": BF16,
    "core-i7-13700k": FP32,
    "epyc-zen2": FP32,
    "epyc-zen3": FP32,
    "epyc-zen4": BF16,
    "epyc-zen5": BF16,
    "graviton2": FP32,
    "graviton3": BF16,
    "graviton4": BF16,
    "ampere-altra": FP32,
    "raspberry-pi-4": FP32,
    "raspberry-pi-5": FP32,
    "snapdragon-6-gen-4": BF16,
    "m1-cpu": FP32,
    "m2-cpu": FP32,
    "power9": FP32,
}


def known(name: str) -> Hardware:
    return amphal.known_hardware()[name].hardware


def test_every_row_has_an_expectation_and_every_expectation_a_row() -> None:
    """The table and the expectations name the same devices, at least 50 of them."""
    assert set(amphal.known_hardware()) == set(EXPECTED)
    assert len(EXPECTED) >= 50


@pytest.mark.parametrize("name", EXPECTED)
def test_the_decision_for_known_hardware(name: str) -> None:
    """detect() chooses the expected dtype and scaler for this device."""
    plan = amphal.detect(known(name))
    assert (plan.dtype, plan.use_scaler) == EXPECTED[name], plan.explain()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_plan_for_known_hardware_can_be_read_and_stored(name: str) -> None:
    """explain() names the device and the dtype in whole sentences; to_dict() goes through JSON."""
    hardware = known(name)
    plan = amphal.detect(hardware)
    text = plan.explain()
    assert text.startswith(f"{hardware.name} ({hardware.device_type}): ")
    assert text.endswith(".")
    assert ".." not in text
    assert "\n" not in text
    stored = json.loads(json.dumps(plan.to_dict()))
    assert stored["hardware"]["name"] == hardware.name
    assert stored["support"]["bf16"]["level"] in ("native", "emulated", "absent")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_row_is_facts_with_a_public_source(name: str) -> None:
    """A row gives a product name and facts to decide by, and says where they are published."""
    row = amphal.known_hardware()[name]
    assert re.search(r"https://|[\w.-]+#\d+|archspec/archspec-json ", row.source), row.source
    hardware = row.hardware
    assert hardware.name
    assert hardware.index is None
    assert hardware.capability or hardware.architecture or hardware.flags


def test_the_table_states_no_judgement() -> None:
    """A row holds fields of Hardware and a source, and nothing that says what a dtype is worth."""
    text = resources.files("amphal.data").joinpath("hardware.toml").read_text(encoding="utf-8")
    allowed = {f.name for f in dataclasses.fields(Hardware)} - {"index", "torch"} | {"source"}
    for name, facts in tomllib.loads(text).items():
        assert set(facts) <= allowed, name
        assert "source" in facts, name


def test_the_table_is_read_only() -> None:
    """known_hardware() is one mapping that nobody can change."""
    table = amphal.known_hardware()
    assert table is amphal.known_hardware()
    with pytest.raises(TypeError):
        table["t4"] = table["h100"]  # type: ignore[index]


def test_the_same_facts_give_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision depends on the record alone: not on the environment, nor on earlier questions."""
    before = {name: amphal.detect(known(name)) for name in EXPECTED}
    amphal.detect.cache_clear()
    monkeypatch.setenv("AMPHAL_DEVICE", "cpu")
    monkeypatch.setenv("AMPHAL_PRECISION", "fp32")
    for name in reversed(EXPECTED):
        copy = dataclasses.replace(known(name))
        assert amphal.detect(copy) == before[name]


def test_deciding_reads_nothing_from_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deciding for a record asks no driver, no OS and no torch build."""
    before = {name: amphal.detect(known(name)) for name in EXPECTED}
    amphal.detect.cache_clear()

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the machine was read")

    for owner, attribute in (
        (torch.cuda, "is_available"),
        (torch.cuda, "get_device_properties"),
        (torch.cuda, "is_bf16_supported"),
        (torch.xpu, "is_available"),
        (torch.xpu, "is_bf16_supported"),
        (torch.backends.mps, "is_available"),
        (torch.backends.mps, "is_macos_or_newer"),
        (platform, "system"),
        (platform, "machine"),
        (platform, "mac_ver"),
        (subprocess, "run"),
    ):
        monkeypatch.setattr(owner, attribute, refuse)
    for name in EXPECTED:
        assert amphal.detect(known(name)) == before[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_decision_does_not_change_with_torch(name: str) -> None:
    """One definition of support: the dtype and the scaler are the same on every torch."""
    for version in ((2, 6), (2, 8), (2, 13), (2, 20)):
        plan = amphal.detect(dataclasses.replace(known(name), torch=version))
        assert (plan.dtype, plan.use_scaler) == EXPECTED[name]


def test_a_record_is_json_able_and_rebuilds_itself() -> None:
    """Hardware.to_dict() through JSON gives back an equal record."""
    for row in amphal.known_hardware().values():
        assert Hardware(**json.loads(json.dumps(row.hardware.to_dict()))) == row.hardware


def test_importing_amphal_does_not_read_the_table() -> None:
    """The table is read on first use, not at import."""
    code = (
        "import amphal, sys; from amphal.contract.known_hardware import known_hardware as k; "
        "assert k.cache_info().currsize == 0; assert 'amphal.data' not in sys.modules"
    )
    command, folder = [sys.executable, "-c", code], tempfile.gettempdir()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
