"""detect() and Plan: the choice, the environment, the cache, the errors."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import warnings
from typing import Any

import pytest
import torch

import amphal
from amphal._choice import choose
from amphal.contract import Availability, ScalerSupport, get_backend, register_backend
from amphal.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendError,
    DeviceNotAvailableError,
    UnknownDeviceError,
    UnsupportedPrecisionError,
)
from amphal.testing import simulate

T4 = amphal.Hardware("cuda", "Tesla T4", vendor="nvidia", capability=(7, 5))
H100 = amphal.Hardware("cuda", "NVIDIA H100", vendor="nvidia", capability=(9, 0))


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMPHAL_DEVICE", raising=False)
    monkeypatch.delenv("AMPHAL_PRECISION", raising=False)
    amphal.detect.cache_clear()


def test_it_takes_the_available_backend_of_highest_priority() -> None:
    """An accelerator wins over the CPU, and the plan says so."""
    with simulate(H100):
        plan = amphal.detect()
        assert (plan.device.type, plan.dtype, plan.use_scaler) == ("cuda", torch.bfloat16, False)
        assert any("highest priority" in reason for reason in plan.reasons)


def test_why_the_others_are_absent_is_told() -> None:
    """A "no" carries its reason into the explanation."""
    plan = amphal.detect()
    passed = [n for n in ("cuda", "xpu", "mps") if n != plan.device.type]
    missing = [n for n in passed if not get_backend(n).available()]
    assert all(n in plan.explain() for n in missing)


@pytest.mark.parametrize(
    "spelling", ["cpu", torch.device("cpu"), amphal.Hardware("cpu", "some CPU")]
)
def test_every_spelling_of_a_device(spelling: str) -> None:
    """A string, a torch.device and a Hardware all name a device."""
    assert amphal.detect(spelling).device == torch.device("cpu")


def test_an_index_is_kept() -> None:
    """detect("cuda:1") answers for that card; without an index the plan has none either."""
    with simulate(T4):
        assert amphal.detect("cuda:1").device == torch.device("cuda", 1)
        assert amphal.detect("cuda:1").hardware.index == 1
        assert amphal.detect("cuda").device == torch.device("cuda")


def test_cards_of_two_kinds_are_answered_one_by_one() -> None:
    """An index-less question follows the current device, even from the cache."""
    with simulate(T4) as fake:
        current = [0]
        two = dataclasses.replace(
            fake,
            probe=lambda index: (T4, H100)[current[0] if index is None else index],
            current_index=lambda: current[0],
        )
        register_backend(two, replace=True)
        assert amphal.detect("cuda:0").dtype is torch.float16
        assert amphal.detect("cuda:1").dtype is torch.bfloat16
        assert amphal.detect("cuda").dtype is torch.float16
        current[0] = 1
        assert amphal.detect("cuda").dtype is torch.bfloat16
        assert amphal.detect().dtype is torch.bfloat16


def test_what_was_warned_of_is_bounded() -> None:
    """There is no end to descriptions of hardware: 600 of them leave no more than 256 records."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        for number in range(600):
            described = amphal.Hardware("cuda", f"Tesla T4 {number}", capability=(7, 5))
            amphal.detect(described, precision="bf16")
            assert 0 < len(choose._warned) <= 256


def test_a_named_precision_is_used_with_one_warning() -> None:
    """What the user names is done if it can be at all; emulated bf16 warns once, by its reason."""
    with simulate(T4):
        with pytest.warns(amphal.PrecisionWarning, match="emulated") as caught:
            plan = amphal.detect("cuda", precision="bf16")
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert plan.dtype is torch.bfloat16
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            amphal.detect("cuda", precision="bf16")
            amphal.detect("cuda", precision=torch.bfloat16)


@pytest.mark.parametrize("precision", ["fp32", "float32", torch.float32, "FP32"])
def test_full_precision_is_silent(precision: str) -> None:
    """fp32 is a choice like the others, and never warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = amphal.detect("cpu", precision=precision)
    assert (plan.dtype, plan.use_scaler) == (torch.float32, False)


def test_fp16_ties_the_scaler_to_the_dtype() -> None:
    """fp16 without a scaler underflows in silence: one plan decides both."""
    plan = amphal.detect(T4)
    assert (plan.dtype, plan.use_scaler) == (torch.float16, True)


def test_a_precision_that_the_hardware_lacks_is_an_error_that_says_what_it_can() -> None:
    """Never a silent fallback to fp32."""
    old = amphal.Hardware("mps", "Apple M2", architecture="M2", os="darwin", os_version=(13, 6))
    with pytest.raises(UnsupportedPrecisionError, match=r"bf16.*It can do: .*fp16"):
        amphal.detect(old, precision="bf16")


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("cud", UnknownDeviceError, "'cuda'"),
        ("npu", UnknownDeviceError, "no backend is registered for device type 'npu'"),
        ("", ArgumentError, "must look like"),
        ("CUDA", ArgumentError, "'cuda'"),
        ("cuda:", ArgumentError, "must look like"),
        ("cuda:-1", ArgumentError, "must look like"),
        ("cuda 0", ArgumentError, "must look like"),
        (0, ArgumentTypeError, "got int"),
        (b"cuda", ArgumentTypeError, "got bytes"),
        ([], ArgumentTypeError, "got list"),
        (torch.float16, ArgumentTypeError, "got dtype"),
    ],
)
def test_a_wrong_device(device: object, error: type[Exception], message: str) -> None:
    """What was given, what is allowed, what to do: as an AmphalError with its builtin parent."""
    with pytest.raises(error, match=message) as caught:
        amphal.detect(device)  # type: ignore[arg-type]
    assert isinstance(caught.value, amphal.AmphalError)
    assert isinstance(caught.value, (ValueError, TypeError))


@pytest.mark.parametrize(
    ("precision", "error", "message"),
    [
        ("bf17", UnsupportedPrecisionError, "Did you mean 'bf16'"),
        ("", UnsupportedPrecisionError, "'bf16', 'fp16', 'fp32'"),
        (torch.float64, UnsupportedPrecisionError, "float64"),
        (torch.int8, UnsupportedPrecisionError, "int8"),
        (None, ArgumentTypeError, "NoneType"),
        (16, ArgumentTypeError, "got int"),
    ],
)
def test_a_wrong_precision(precision: object, error: type[Exception], message: str) -> None:
    """The three precisions are named in the error."""
    with pytest.raises(error, match=message):
        amphal.detect("cpu", precision=precision)  # type: ignore[arg-type]


def test_an_absent_device_is_an_error_with_its_reason() -> None:
    """Named and absent: an error that says why, and what is there instead."""
    with pytest.raises(DeviceNotAvailableError, match=r"fell off.*Available: .*cpu"):
        with simulate(T4) as fake:
            gone = Availability(False, "the card fell off the bus")
            away = dataclasses.replace(fake, available=lambda: gone)
            register_backend(away, replace=True)
            amphal.detect("cuda")


def test_a_device_that_cannot_be_probed_is_passed_over_with_its_reason() -> None:
    """A broken driver costs its own backend only, and the plan says what happened."""

    def broken(index: int | None) -> amphal.Hardware:
        raise RuntimeError("no such device")

    with simulate(T4) as fake:
        register_backend(dataclasses.replace(fake, probe=broken), replace=True)
        plan = amphal.detect()
        assert plan.device.type != "cuda"
        assert "no such device" in plan.explain()
        with pytest.raises(DeviceNotAvailableError, match="no such device"):
            amphal.detect("cuda:9")


def test_the_environment_wins_over_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMPHAL_DEVICE and AMPHAL_PRECISION stand in for arguments left out."""
    monkeypatch.setenv("AMPHAL_DEVICE", "cpu")
    with simulate(H100):
        assert amphal.detect().device.type == "cpu"
        monkeypatch.setenv("AMPHAL_DEVICE", "cuda:3")
        amphal.detect.cache_clear()
        assert amphal.detect().device == torch.device("cuda:3")
        monkeypatch.setenv("AMPHAL_PRECISION", "FP16")
        amphal.detect.cache_clear()
        assert amphal.detect().dtype is torch.float16
        monkeypatch.setenv("AMPHAL_PRECISION", "auto")
        amphal.detect.cache_clear()
        assert amphal.detect().dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore::amphal.errors.PrecisionWarning")
def test_the_environment_is_read_at_the_first_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, both variables; a later change counts after cache_clear(), for regions too."""
    monkeypatch.setenv("AMPHAL_DEVICE", "cpu")
    monkeypatch.setenv("AMPHAL_PRECISION", "bf16")
    with simulate(amphal.Hardware("cpu", "x")):
        assert amphal.detect().dtype is torch.bfloat16
        monkeypatch.setenv("AMPHAL_DEVICE", "cuda:3")
        monkeypatch.setenv("AMPHAL_PRECISION", "fp32")
        assert amphal.detect("cpu").dtype is torch.bfloat16
        assert amphal.detect(precision="fp32").device.type == "cpu"
        with amphal.autocast():
            assert torch.is_autocast_enabled("cpu")
        monkeypatch.setenv("AMPHAL_DEVICE", "cpu")
        amphal.detect.cache_clear()
        assert amphal.detect().dtype is torch.float32
        with amphal.autocast():
            assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("named", ["CPU", "Cpu", " cpu "])
def test_case_does_not_matter_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """AMPHAL_DEVICE=CPU names the CPU, as AMPHAL_PRECISION=FP16 names fp16; regions agree."""
    monkeypatch.setenv("AMPHAL_DEVICE", named)
    with simulate(H100):
        assert amphal.detect().device == torch.device("cpu")
        for enabled in (True, False):
            assert amphal.autocast(dtype="bf16", enabled=enabled).device == "cpu"


@pytest.mark.parametrize("index", [128, 300, 10**30])
def test_a_description_has_an_index_that_torch_can_hold(index: int) -> None:
    """torch wraps larger indices, so a description with one is refused, as detect("cpu:300") is."""
    with pytest.raises(ArgumentError, match="index must be 0 to 127"):
        amphal.Hardware("cuda", "x", index=index)
    assert amphal.Hardware("cuda", "x", index=127).index == 127


@pytest.mark.parametrize("field", ["capability", "os_version", "torch"])
def test_versions_of_a_description_are_numbers(field: str) -> None:
    """("8", "0") is refused: it is text, not a pair of ints."""
    wrong: dict[str, Any] = {field: ("8", "0")}
    with pytest.raises(ArgumentTypeError, match=f"{field} must be a"):
        amphal.Hardware("cuda", "x", **wrong)


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script says is what happens."""
    monkeypatch.setenv("AMPHAL_DEVICE", "cuda")
    monkeypatch.setenv("AMPHAL_PRECISION", "bf16")
    assert amphal.detect("cpu", precision="fp32").dtype is torch.float32


def test_a_description_reads_nothing_from_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hardware is a question about another machine: the environment here has no say in it."""
    monkeypatch.setenv("AMPHAL_DEVICE", "nonsense!")
    monkeypatch.setenv("AMPHAL_PRECISION", "fp32")
    assert amphal.detect(H100).dtype is torch.bfloat16


@pytest.mark.parametrize(("name", "value"), [("AMPHAL_DEVICE", "gpu!"), ("AMPHAL_PRECISION", "x")])
def test_a_wrong_environment_value_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """The error names the variable, so that nobody searches the script for it."""
    monkeypatch.setenv(name, value)
    with pytest.raises(amphal.AmphalError, match=name):
        amphal.detect()


def test_the_answer_is_cached_and_can_be_forgotten() -> None:
    """The same question gives the same object, until cache_clear()."""
    plan = amphal.detect("cpu")
    assert amphal.detect("cpu") is plan
    amphal.detect.cache_clear()
    assert amphal.detect("cpu") is not plan
    assert amphal.detect("cpu") == plan


def test_a_plan_is_frozen_hashable_and_travels() -> None:
    """A plan can be a key, be sent to another process, be copied and be printed as JSON."""
    plan = amphal.detect(T4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.dtype = torch.float32  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.support[torch.float16] = None  # type: ignore[index]
    for other in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert other == plan
        assert hash(other) == hash(plan)
    assert json.loads(json.dumps(plan.to_dict()))["dtype"] == "float16"


def test_explain_is_a_paragraph() -> None:
    """The hardware, the precision, the scaler and the reasons, in sentences."""
    text = amphal.detect(T4).explain()
    assert "Tesla T4" in text
    assert "fp16 with a gradient scaler" in text
    assert text.endswith(".")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtypes": lambda hw: {torch.bfloat16: True}}, "DtypeSupport"),
        ({"dtypes": lambda hw: 1 / 0}, "ZeroDivisionError"),
        ({"scaler": lambda hw: None}, "ScalerSupport"),
        ({"probe": lambda index: "T4"}, "amphal.Hardware"),
    ],
)
def test_a_backend_that_answers_wrongly_is_named(change: dict[str, object], message: str) -> None:
    """The error blames the backend, with what it said."""
    with simulate(T4) as fake:
        register_backend(dataclasses.replace(fake, **change), replace=True)  # type: ignore
        with pytest.raises(BackendError, match=message):
            amphal.detect("cuda")


def test_undeclared_dtypes_are_absent() -> None:
    """A backend that says nothing about a dtype cannot be made to use it."""
    with simulate(T4) as fake:
        register_backend(dataclasses.replace(fake, dtypes=lambda hw: {}), replace=True)
        assert amphal.detect("cuda").dtype is torch.float32
        with pytest.raises(UnsupportedPrecisionError, match="declares no support"):
            amphal.detect("cuda", precision="fp16")


def test_saturating_hardware_gets_no_scaler_and_no_fp16_by_default() -> None:
    """Where fp16 saturates instead of overflowing, a scaler would see nothing."""
    with simulate(T4) as fake:
        blind = ScalerSupport(True, True, detects_overflow=False, fused_optimizers=False)
        register_backend(dataclasses.replace(fake, scaler=lambda hw: blind), replace=True)
        assert amphal.detect("cuda").dtype is torch.float32
        with pytest.warns(amphal.PrecisionWarning, match="saturates"):
            plan = amphal.detect("cuda", precision="fp16")
        assert not plan.use_scaler


@pytest.mark.parametrize("device", ["cpu:128", "cpu:300", "cpu:" + "9" * 5000, "cpu:\uff11"])
def test_an_index_beyond_torchs_own_is_refused(device: str) -> None:
    """torch keeps an index in eight bits and wraps what does not fit: cpu:300 became cpu:44."""
    with pytest.raises(ArgumentError):
        amphal.detect(device)


def test_an_answer_that_the_registry_overtook_is_not_kept() -> None:
    """A backend replaced while its question is being answered: the next question sees the new."""
    cpu = get_backend("cpu")

    def probe(index: int | None) -> amphal.Hardware:
        register_backend(cpu, replace=True)
        return amphal.Hardware("cpu", "overtaken")

    with simulate(amphal.Hardware("cpu", "x")) as fake:
        register_backend(dataclasses.replace(fake, probe=probe), replace=True)
        assert amphal.detect("cpu").hardware.name == "overtaken"
        assert amphal.detect("cpu").hardware.name != "overtaken"


@pytest.mark.parametrize("change", [{"dtype": torch.float64}, {"device": "cpu"}, {"dtype": "bf16"}])
def test_a_plan_checks_itself(change: dict[str, object]) -> None:
    """A plan made by hand is refused where it is made."""
    with pytest.raises(amphal.AmphalError, match="Plan: "):
        dataclasses.replace(amphal.detect("cpu"), **change)  # type: ignore[arg-type]


def test_auto_is_among_the_precisions_that_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of detect() names all that it takes."""
    with pytest.raises(UnsupportedPrecisionError, match="'auto', 'bf16'"):
        amphal.detect("cpu", precision="bf61")


@pytest.mark.parametrize(
    "fields",
    [
        {"flags": 5},
        {"flags": [[1]]},
        {"flags": {1, "a"}},
        {"capability": "80"},
        {"capability": (float("inf"), 0)},
        {"memory": -1},
    ],
)
def test_hardware_checks_its_fields(fields: dict[str, object]) -> None:
    """Every wrong field is an AmphalError, where the record is made."""
    with pytest.raises(amphal.AmphalError, match="Hardware: "):
        amphal.Hardware("cpu", "x", **fields)  # type: ignore[arg-type]
