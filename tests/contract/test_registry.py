"""The registry: entry points scanned once, failures as rows, names taken once."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from typing import Any

import pytest

import amphal
from amphal.contract import (
    Availability,
    DtypeSupport,
    get_backend,
    register_backend,
    registered_backends,
    unregister_backend,
)
from amphal.contract import registry as _registry
from amphal.errors import (
    ArgumentTypeError,
    BackendError,
    DeviceNotAvailableError,
    DuplicateBackendError,
    UnknownDeviceError,
)


def test_the_four_built_in_backends_come_through_their_entry_points() -> None:
    """Built-ins use the door that plug-ins use: each row names the distribution it came from."""
    rows = registered_backends()
    assert {"cuda", "xpu", "mps", "cpu"} <= set(rows)
    assert all(rows[n].source.startswith("amphal ") for n in ("cuda", "xpu", "mps", "cpu"))
    assert all(rows[n].backend is not None and not rows[n].error for n in ("cuda", "cpu"))


def test_the_view_is_read_only() -> None:
    """Nobody changes the registry through what registered_backends() returns."""
    with pytest.raises(TypeError):
        registered_backends()["x"] = None  # type: ignore[index]


def test_an_unknown_device_type_offers_what_is_registered() -> None:
    """The error says what was given, what is registered, the near name, and how to add one."""
    with pytest.raises(UnknownDeviceError, match=r"'cudda'.*cpu, cuda, mps, xpu.*'cuda'"):
        get_backend("cudda")


def test_a_precision_in_the_place_of_the_device_is_told_so() -> None:
    """The device comes first, in both: ``detect("bf16")`` says which argument was meant."""
    for call in (amphal.detect, amphal.autocast):
        with pytest.raises(UnknownDeviceError, match="'bf16' is a precision: name it"):
            call("bf16")


def test_a_device_type_is_taken_once() -> None:
    """A second backend for a device type is refused, both named, and nothing changes."""
    cpu = get_backend("cpu")
    with pytest.raises(DuplicateBackendError, match=r"already registered by amphal .*cpu"):
        register_backend(dataclasses.replace(cpu, priority=7))
    assert get_backend("cpu") is cpu


def test_replace_and_unregister() -> None:
    """replace=True takes the place of a backend; the plan cache forgets what it knew."""
    cpu = get_backend("cpu")
    before = amphal.detect("cpu")
    with _registry.overridden(cpu):
        register_backend(dataclasses.replace(cpu, priority=7), replace=True)
        assert get_backend("cpu").priority == 7
        assert amphal.detect("cpu") is not before
        taken = unregister_backend("cpu")
        assert taken is not None
        with pytest.raises(UnknownDeviceError):
            amphal.detect("cpu")
        register_backend(taken)
        assert get_backend("cpu") is taken
    assert get_backend("cpu") is cpu


@pytest.mark.parametrize("wrong", [None, "cpu", object, 3])
def test_only_a_backend_can_be_registered(wrong: object) -> None:
    """Anything but a Backend is a typed error that names what came."""
    with pytest.raises(ArgumentTypeError, match=r"takes an amphal\.contract\.Backend"):
        register_backend(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_type": "CUDA"}, "lower case"),
        ({"device_type": "cuda:0"}, "no index"),
        ({"device_type": 3}, "must be a string"),
        ({"priority": "high"}, "priority must be an int"),
        ({"priority": True}, "priority must be an int"),
        ({"available": True}, "available must be a function"),
        ({"probe": None}, "probe must be a function"),
        ({"vendor_scaler": 1}, "function or None"),
        ({"contract": 0}, "contract 0.*contract 1"),
    ],
)
def test_a_backend_is_validated_when_it_is_built(change: dict[str, object], message: str) -> None:
    """A wrong field is an error at once, in the backend's own words, not later in a user's run."""
    with pytest.raises(amphal.AmphalError, match=message):
        dataclasses.replace(get_backend("cpu"), **change)  # type: ignore[arg-type]


def test_available_that_raises_is_a_reasoned_no() -> None:
    """available() promised not to raise; a backend that breaks its promise is absent, with why."""

    def broken() -> Availability:
        raise OSError("driver exploded")

    backend = dataclasses.replace(get_backend("cpu"), available=broken)
    answer = _registry.availability(backend)
    assert not answer
    assert "OSError: driver exploded" in answer.reason


def test_available_of_the_wrong_type_is_a_reasoned_no() -> None:
    """A bare True carries no contract; it is refused and named."""
    backend = dataclasses.replace(get_backend("cpu"), available=lambda: True)  # type: ignore
    answer = _registry.availability(backend)
    assert not answer
    assert "returned True" in answer.reason


@pytest.mark.parametrize(
    ("record", "kwargs", "message"),
    [
        (Availability, {"ok": False}, "needs a reason"),
        (
            DtypeSupport,
            {"level": "slow", "accelerated": True, "why": "x"},
            "native",
        ),
        (
            DtypeSupport,
            {"level": "native", "accelerated": 1, "why": "x"},
            "True or False",
        ),
        (DtypeSupport, {"level": "native", "accelerated": True, "why": ""}, "why"),
        (
            DtypeSupport,
            {"level": "absent", "accelerated": True, "why": "x"},
            "absent",
        ),
        (amphal.Hardware, {"device_type": "cuda:0", "name": "x"}, "without an index"),
        (amphal.Hardware, {"device_type": "cuda", "name": "x", "index": -1}, "0 to 127"),
        (amphal.Hardware, {"device_type": "cuda", "name": "x", "capability": 75}, "tuple of ints"),
        (amphal.Hardware, {"device_type": "cpu", "name": "x", "flags": "amx"}, "set of strings"),
        (amphal.OpLists, {"fp32": {"exp"}, "promote": {"exp"}}, "both fp32 and promote"),
        (amphal.OpLists, {"fp32": "exp"}, "set of op names"),
    ],
)
def test_records_refuse_what_makes_no_sense(
    record: type, kwargs: dict[str, object], message: str
) -> None:
    """The contract's records check themselves; an error says which field and what it may be."""
    with pytest.raises(amphal.AmphalError, match=message):
        record(**kwargs)


@pytest.mark.parametrize("wrong", [None, 5, [], object()])
def test_a_name_must_be_a_string(wrong: object) -> None:
    """What is no string is a typed error, hashable or not."""
    with pytest.raises(ArgumentTypeError, match="must be a string"):
        get_backend(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="must be a string"):
        unregister_backend(wrong)  # type: ignore[arg-type]


def test_an_exception_that_cannot_be_printed_is_a_reason_too() -> None:
    """A vendor's exception class may raise when asked for its text."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def broken() -> Availability:
        raise Mute

    backend = dataclasses.replace(get_backend("cpu"), available=broken)
    assert "Mute" in _registry.availability(backend).reason


def test_the_registry_can_change_while_it_is_iterated() -> None:
    """A view is the registry of that moment."""
    view = registered_backends()
    before = len(view)
    for _ in view:
        with _registry.overridden(dataclasses.replace(get_backend("cpu"), device_type="x")):
            pass
    assert len(view) == before


class _Odd:
    """What a vendor's function may return by mistake."""


@pytest.mark.parametrize(
    ("op_lists", "said"),
    [
        (lambda dtype: {"mm": "fp32"}, "must return an amphal.OpLists, got {'mm': 'fp32'}"),
        (lambda dtype: amphal.OpLists(fp32={"mm"}, promote={"mm"}), "'mm' is in both"),  # type: ignore[arg-type]
    ],
)
def test_wrong_op_lists_are_an_error_that_names_the_backend(op_lists: Any, said: str) -> None:
    """A backend whose lists cannot be had says so where they are asked for, and at no other."""
    cpu = get_backend("cpu")
    with _registry.overridden(dataclasses.replace(cpu, op_lists=op_lists)):
        assert amphal.detect("cpu").device.type == "cpu"
        with pytest.raises(BackendError, match="'cpu'") as error:
            amphal.op_lists("cpu")
    assert said in str(error.value)


def _no_scaler() -> Any:
    raise OSError("libvendor.so")


@pytest.mark.parametrize(
    ("vendor_scaler", "said"),
    [(_no_scaler, "raised OSError: libvendor.so"), (lambda: _Odd, "a subclass of torch.amp.Grad")],
)
def test_a_wrong_vendor_scaler_is_an_error_that_names_the_backend(
    vendor_scaler: Any, said: str
) -> None:
    """Where only the vendor's scaler can work and it cannot be had, GradScaler says why."""
    cpu = get_backend("cpu")
    blind = lambda hw: dataclasses.replace(cpu.scaler(hw), detects_overflow=False)  # noqa: E731
    wrong = dataclasses.replace(cpu, scaler=blind, vendor_scaler=vendor_scaler)
    with _registry.overridden(wrong), warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        plan = amphal.detect("cpu", precision="fp16")
        with pytest.raises(BackendError, match="'cpu'") as error:
            amphal.GradScaler(plan)
    assert said in str(error.value)


def test_detect_answers_while_other_threads_register() -> None:
    """Threads that add and remove backends leave every answer of another thread right."""
    from amphal.testing import FakeBackend

    stop, wrong = threading.Event(), []

    def come_and_go(name: str) -> None:
        while not stop.is_set():
            register_backend(FakeBackend(name, priority=900, available="it left"))
            unregister_backend(name)

    threads = [threading.Thread(target=come_and_go, args=(f"guest{n}",)) for n in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            if amphal.detect("cpu").device.type != "cpu" or "guest" in str(amphal.detect().device):
                wrong.append(amphal.detect())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert not [name for name in registered_backends() if name.startswith("guest")]


def test_without_the_built_in_backends_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process may take out the built-in backends."""
    monkeypatch.setattr(_registry, "_rows", dict(registered_backends()))
    amphal.detect.cache_clear()
    for name in ("cuda", "xpu", "mps", "cpu"):
        unregister_backend(name)
    with pytest.raises(DeviceNotAvailableError, match="no registered backend has"):
        amphal.detect()
    with pytest.raises(UnknownDeviceError, match="'cpu'"):
        amphal.detect("cpu")


def test_a_backend_without_a_number_was_written_for_the_first_contract(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An amphal of contract 2 refuses it and names both; today's amphal takes it."""
    from amphal.contract import records

    cpu = get_backend("cpu")
    functions = (cpu.available, cpu.probe, cpu.dtypes, cpu.op_lists, cpu.scaler)
    assert amphal.contract.Backend("imagined", 0, *functions).contract == 1
    monkeypatch.setattr(records, "CONTRACT_VERSION", 2)
    with pytest.raises(amphal.errors.ArgumentError, match=r"contract 1, .* contract 2"):
        amphal.contract.Backend("imagined", 0, *functions)
