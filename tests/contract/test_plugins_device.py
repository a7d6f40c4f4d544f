"""FakeBackend, and the device in pure Python (in a process of its own: torch keeps its name)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.plugins.distribution import python

import amphal
from amphal import Hardware
from amphal.contract import DtypeSupport, register_backend, unregister_backend
from amphal.errors import DeviceNotAvailableError, TorchTooOldError
from amphal.testing import FakeBackend, install_device, simulate
from amphal.testing._device import why_not_installable

FP16 = {torch.float16: DtypeSupport("native", True, "the test says so")}


def test_a_fake_backend_takes_values_for_functions() -> None:
    """A decision for an imagined device is a few values, registered and asked."""
    here = Hardware("imagined", "Imagined One")
    register_backend(FakeBackend("imagined", available=True, probe=here, dtypes=FP16))
    try:
        plan = amphal.detect("imagined")
        assert (plan.dtype, plan.use_scaler) == (torch.float16, True)
        with simulate(Hardware("imagined", "Imagined Two")):
            assert amphal.detect("imagined").hardware.name == "Imagined Two"
    finally:
        unregister_backend("imagined")


def test_a_fake_backend_can_be_absent_for_a_reason() -> None:
    """The reason is what the error of detect() says."""
    register_backend(FakeBackend("imagined", available="it was never built"))
    try:
        with pytest.raises(DeviceNotAvailableError, match="it was never built"):
            amphal.detect("imagined")
    finally:
        unregister_backend("imagined")


def test_without_its_device_a_fake_backend_says_what_to_call() -> None:
    """The default answer names install_device(), or the torch that it needs."""
    answer = FakeBackend("imagined").available()
    assert not answer
    assert (why_not_installable() or "install_device('imagined')") in answer.reason


def test_an_old_torch_is_an_error_that_says_which_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before torch 2.10 there is no device in pure Python (its hook is taken away here)."""
    from torch.utils import backend_registration

    monkeypatch.delattr(
        backend_registration, "_setup_privateuseone_for_python_backend", raising=False
    )
    with pytest.raises(TorchTooOldError, match=r"2\.10"):
        install_device("toy")


def check_facts(tmp_path: Path, name: str) -> None:
    """Run the tests of that file in a process that has the device."""
    facts = str(Path(__file__).parents[1] / "helpers" / "plugins" / name)
    done = python(
        tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", facts
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr


@pytest.mark.skipif(bool(why_not_installable()), reason="needs torch 2.10")
def test_kernels_follow_lists_that_differ_between_dtypes(tmp_path: Path) -> None:
    """Each region casts by its own dtype's lists, and senseless lists are refused."""
    check_facts(tmp_path, "lists_by_dtype.py")


@pytest.mark.skipif(bool(why_not_installable()), reason="needs torch 2.10")
def test_the_device_in_pure_python_keeps_its_promises(tmp_path: Path) -> None:
    """It computes, trains, refuses mixed devices, and passes the suite with a FakeBackend."""
    check_facts(tmp_path, "on_the_toy.py")


@pytest.mark.skipif(bool(why_not_installable()), reason="needs torch 2.10")
def test_declared_is_live_where_an_extension_registers_part(tmp_path: Path) -> None:
    """amphal casts what is declared and not registered; a dtype that torch would drop is refused.

    The suite finds the dtype too: the one failed check that is named for it, and those of regions.
    """
    facts = str(Path(__file__).parents[1] / "helpers" / "plugins" / "part_of_the_kernels.py")
    options = ("-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "--tb=no", facts)
    alone = python(tmp_path, "-m", "pytest", *options, "-k", "not TestTheSuite")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    suite = python(tmp_path, "-m", "pytest", *options, "-k", "agrees_on_dtypes")
    assert "test_the_extension_agrees_on_dtypes[fp16]" in suite.stdout.partition("FAILED")[2]
    assert "1 failed, 1 passed" in suite.stdout
