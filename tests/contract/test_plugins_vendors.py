"""The examples for vendors' devices, with stand-ins for the vendors' modules: no hardware here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.plugins.distribution import distribution, python

import amphal
from amphal import Hardware
from amphal.contract import Backend, register_backend, unregister_backend
from amphal.errors import DeviceNotAvailableError
from amphal.testing._device import why_not_installable

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugins"
VENDORS = ("hpu", "mlu", "musa", "npu")


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BACKENDS = {name: load(name).BACKEND for name in VENDORS}


@pytest.fixture(params=VENDORS)
def registered(request: pytest.FixtureRequest) -> Iterator[Backend]:
    backend = BACKENDS[request.param]
    register_backend(backend)
    yield backend
    unregister_backend(backend.device_type)


def hardware(device_type: str, name: str, *flags: str) -> Hardware:
    return Hardware(device_type, name, flags=frozenset(flags))


# What detect() must say of a model: dtype, and whether with a scaler.
MODELS = [
    (hardware("npu", "Ascend910A"), torch.float16, True),
    (hardware("npu", "Ascend910B"), torch.float16, True),
    (hardware("npu", "Ascend910ProB"), torch.float16, True),
    (hardware("npu", "Ascend310P3"), torch.float16, True),
    (hardware("npu", "Ascend910B1", "bf16", "inf_nan"), torch.bfloat16, False),
    (hardware("npu", "Ascend910B4"), torch.bfloat16, False),
    (hardware("npu", "Ascend910_9391", "bf16", "inf_nan"), torch.bfloat16, False),
    (hardware("npu", "an Ascend of tomorrow", "bf16", "inf_nan"), torch.bfloat16, False),
    (hardware("hpu", "GAUDI"), torch.bfloat16, False),
    (hardware("hpu", "GAUDI2"), torch.bfloat16, False),
    (hardware("hpu", "GAUDI3"), torch.bfloat16, False),
    (hardware("musa", "MTT S5000", "mp_31", "bf16"), torch.bfloat16, False),
    (hardware("musa", "MTT S80", "mp_21"), torch.float16, True),
    (hardware("mlu", "MLU590", "bf16"), torch.bfloat16, False),
    (hardware("mlu", "MLU370"), torch.float16, True),
]


@pytest.mark.parametrize(("model", "dtype", "scaled"), MODELS, ids=lambda v: getattr(v, "name", ""))
def test_the_choice_by_model(model: Hardware, dtype: torch.dtype, scaled: bool) -> None:
    """Each model gets the dtype that public facts support, and fp16 always with a scaler."""
    backend = BACKENDS[model.device_type]
    register_backend(backend)
    try:
        plan = amphal.detect(model)
    finally:
        unregister_backend(backend.device_type)
    assert (plan.dtype, plan.use_scaler) == (dtype, scaled)


@pytest.mark.parametrize("name", ["Ascend910A", "Ascend910B", "Ascend310P3"])
def test_an_ascend_that_saturates_says_so(name: str) -> None:
    """The first generation gives no inf: its overflow is seen by the vendor's scaler alone."""
    npu = BACKENDS["npu"]
    assert not npu.scaler(hardware("npu", name)).detects_overflow
    assert npu.vendor_scaler is not None


def test_a_later_ascend_in_saturation_mode_says_so() -> None:
    """An Atlas A2 whose runtime reports no inf and NaN (by its environment) saturates too."""
    scaler = BACKENDS["npu"].scaler
    assert scaler(hardware("npu", "Ascend910B2", "bf16", "inf_nan")).detects_overflow
    assert not scaler(hardware("npu", "Ascend910B2", "bf16")).detects_overflow


def test_without_the_vendors_package_the_reason_names_it(
    registered: Backend,
) -> None:
    """On a machine without it, "no" says which package is missing, and detect() passes it on."""
    answer = registered.available()
    assert not answer
    assert "cannot be used: ModuleNotFoundError" in answer.reason
    with pytest.raises(DeviceNotAvailableError, match="cannot be used"):
        amphal.detect(registered.device_type)


@pytest.mark.parametrize("name", VENDORS)
def test_the_file_says_that_it_was_not_run_on_hardware(name: str) -> None:
    """Nobody takes a description for a tested backend."""
    assert "NOT RUN ON HARDWARE" in load(name).__doc__


def test_hpu_is_probed_through_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for habana_frameworks.torch.hpu is asked for what its documentation offers."""
    hpu = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 8,
        current_device=lambda: 0,
        get_device_name=lambda: "GAUDI2",
        synchronize=lambda: None,
    )
    packages = [ModuleType("habana_frameworks"), ModuleType("habana_frameworks.torch")]
    packages[0].torch, packages[1].hpu = packages[1], hpu  # type: ignore[attr-defined]
    names = ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.hpu")
    for name, module in zip(names, [*packages, hpu], strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    backend = BACKENDS["hpu"]
    assert backend.available()
    assert backend.probe(3) == Hardware("hpu", "GAUDI2", 3, vendor="intel", os=sys.platform)
    with pytest.raises(IndexError, match="8"):
        backend.probe(8)


# A vendor's module that gives torch a device in pure Python, with what the vendor's own offers.
STAND_IN = """
from types import SimpleNamespace
import torch
from amphal.testing import install_device

install_device("{name}")
facts = SimpleNamespace(name="{model}", total_memory=1 << 36, major=3, minor=1)
{name} = torch.{name}

def properties(index=None):
    if index not in (None, 0):
        raise AssertionError(f"Invalid device id {{index}}")
    return facts

{name}.get_device_properties = properties
{name}.is_bf16_supported = lambda: True
{name}.synchronize = lambda: None
{name}.utils = SimpleNamespace(is_support_inf_nan=lambda: True)
{name}.amp = SimpleNamespace(GradScaler=torch.amp.GradScaler)
"""

STAND_INS = {"mlu": "MLU590", "musa": "MTT S5000", "npu": "Ascend910B2"}


@pytest.mark.skipif(bool(why_not_installable()), reason="a device in pure Python needs torch 2.10")
@pytest.mark.parametrize("name", STAND_INS)
def test_the_suite_passes_on_a_stand_in_of_the_device(name: str, tmp_path: Path) -> None:
    """With a stand-in vendor module the backend goes through the whole suite, and trains."""
    (tmp_path / f"torch_{name}.py").write_text(STAND_IN.format(name=name, model=STAND_INS[name]))
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    distribution(tmp_path, f"amphal-{name}", source, {name: f"amphal_{name}:BACKEND"})
    options = ("-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "--amphal-backend", name)
    done = python(tmp_path, "-m", "pytest", "--pyargs", "amphal.testing", *options)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert "the_scaler_trains_through_an_overflow" in done.stdout.partition("on the device:")[2]


def test_the_suite_passes_for_a_gaudi_that_is_not_here(tmp_path: Path) -> None:
    """torch knows no hpu tensors, not even fake ones, without the vendor's package: one can ask."""
    source = (EXAMPLES / "hpu.py").read_text(encoding="utf-8")
    distribution(tmp_path, "amphal-hpu", source, {"hpu": "amphal_hpu:BACKEND"})
    options = ("-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "--amphal-backend", "hpu")
    done = python(tmp_path, "-m", "pytest", "--pyargs", "amphal.testing", *options)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert "hpu, not proven: habana_frameworks cannot be used" in done.stdout
