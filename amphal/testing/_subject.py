"""What a run of the conformance suite is about: one backend, its device or a pretended one."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

import torch

from .. import _front
from ..contract import Availability, Backend, Hardware, registry
from ..errors import PrecisionWarning
from ._simulate import simulate

__all__ = [
    "Subject",
    "another_machine",
    "broken_vendor_imports",
    "make_subject",
    "needs_device",
    "precision_named",
    "torch_state",
    "unusual_state",
]

_F = TypeVar("_F", bound=Callable[..., None])


def needs_device(check: _F) -> _F:
    """Mark a check that fake tensors cannot prove; it is left out where the device is absent."""
    check.needs_device = True  # type: ignore[attr-defined]
    return check


@dataclass(frozen=True)
class Subject:
    """One backend under test, with what can be proven of it here."""

    backend: Backend
    availability: Availability
    records: tuple[Hardware, ...]
    """Hardware to ask the pure functions about: what is here, what is known, and a bare record."""
    source: str = ""
    """Where the registry has the backend from; empty for one that the suite registered itself."""

    @property
    def device_type(self) -> str:
        """The device type of the backend."""
        return self.backend.device_type

    @property
    def proof(self) -> str:
        """How the checks that compute are proven here."""
        return "on the device" if self.availability else "on fake tensors"

    @contextlib.contextmanager
    def at_work(self, dtype: torch.dtype | None = None) -> Iterator[_front.Plan]:
        """The plan of the device; where it is absent, that of a record, for fake tensors.

        The record is the first one that can do ``dtype``.
        """
        if self.availability:
            yield _front.detect(self.device_type)
            return
        from torch._subclasses import FakeTensorMode

        records = [r for r in self.records if self._can(r, dtype)] or self.records
        with simulate(records[0]), FakeTensorMode(), torch.no_grad():
            yield _front.detect(self.device_type)

    def why_no_tensors(self) -> str:
        """Why there are no tensors of the device here, not even fake ones; empty if there are."""
        if self.availability:
            return ""
        from torch._subclasses import FakeTensorMode

        try:
            with FakeTensorMode():
                torch.empty(1, device=self.device_type)
        except Exception as exc:  # torch doesn't know the device type without its extension
            return str(exc).partition("\n")[0]
        return ""

    def _can(self, hardware: Hardware, dtype: torch.dtype | None) -> bool:
        support = self.backend.dtypes(hardware)
        return dtype is None or (dtype in support and support[dtype].level != "absent")

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Numbers between 0 and 1 on the device, the same each time; made on the CPU."""
        if not self.availability:
            return torch.empty(shape, dtype=dtype, device=self.device_type)
        count = int(torch.Size(shape).numel())
        values = (torch.arange(count, dtype=torch.float32) % 7 + 1) / 8
        return values.reshape(shape).to(dtype).to(self.device_type)


def make_subject(backend: Backend, source: str, more: Sequence[Hardware]) -> Subject:
    """The subject of a registered backend; the device's own record comes first."""
    availability = registry.availability(backend)
    records = [*more, *_known(backend.device_type)]
    if availability:
        with contextlib.suppress(Exception):  # test_probe_reads_facts shows what is wrong
            records.insert(0, backend.probe(None))
    records.append(Hardware(backend.device_type, "a device that nobody has heard of"))
    return Subject(backend, availability, tuple(records), source)


def _known(device_type: str) -> list[Hardware]:
    from ..contract import known_hardware

    rows = (row.hardware for row in known_hardware().values())
    return [hardware for hardware in rows if hardware.device_type == device_type]


def precision_named(subject: Subject, dtype: torch.dtype) -> _front.Plan:
    """The plan for a dtype that is named, without the warning that it may be slow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        return _front.detect(subject.device_type, precision=dtype)


def torch_state(device_type: str) -> dict[str, Any]:
    """What a pure function, or a region that was left, must leave as it was."""
    state: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "the CPU's random state": bytes(torch.get_rng_state().tolist()),
        "the autocast cache": torch.is_autocast_cache_enabled(),
        "float32's matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the environment": dict(os.environ),
    }
    with contextlib.suppress(RuntimeError):  # a device type that this process doesn't know
        state["autocast"] = torch.is_autocast_enabled(device_type)
        state["the autocast dtype"] = torch.get_autocast_dtype(device_type)
    return state


# What another machine answers: (where, name, answer); a function answers with it.
_OTHER: tuple[tuple[Any, str, Any], ...] = (
    *((platform, name, "other") for name in ("machine", "processor", "system", "release")),
    *((platform, name, "other") for name in ("node", "platform", "version")),
    (platform, "mac_ver", ("99.0", ("", "", ""), "other")),
    (platform, "uname", platform.uname()._replace(system="other", machine="other")),
    (os, "uname", getattr(os, "uname_result", tuple)(("other",) * 5)),
    (os, "cpu_count", 997),
    (time, "time", 0.0),
    (time, "strftime", "other"),
    (sys, "platform", "other"),
    (torch.version, "cuda", "other"),
    (torch.version, "hip", "other"),
)


@contextlib.contextmanager
def another_machine(device_type: str, another_torch: bool = False) -> Iterator[list[str]]:
    """What a function could read of this machine looks different: a pure one doesn't notice.

    Gives the list of what it did all the same: it asked a file, a process or one of torch's modules
    of devices, or it changed the state of the process.
    ``another_torch``: torch's version looks different too, which is a fact of the record.
    """
    asked: list[str] = []
    with unusual_state(device_type) as changed, contextlib.ExitStack() as undo:
        undo.callback(os.environ.update, dict(os.environ))
        undo.callback(os.environ.clear)
        version = (torch, "__version__", type(torch.__version__)("99.0"))
        answers = [*_OTHER, *[version] * another_torch, *_devices_of_torch(device_type, asked)]
        for owner, name, answer in answers:
            if hasattr(owner, name):
                real = getattr(owner, name)
                undo.callback(setattr, owner, name, real)
                other = answer if callable(answer) or not callable(real) else _answering(answer)
                setattr(owner, name, other)
        os.environ.clear()
        _listen()
        _heard.lists.append(asked)
        undo.callback(_heard.lists.pop)
        yield asked
        if os.environ:
            asked.append(f"the environment, setting {', '.join(os.environ)}")
    asked += [f"the state of the process, changing {name}" for name in changed]


@contextlib.contextmanager
def unusual_state(device_type: str) -> Iterator[list[str]]:
    """A state of torch that nobody sets; the list has, at the end, what the block has changed.

    Whoever sets the usual state, or the same one at each call, would not show in a usual one.
    """
    changed: list[str] = []
    default, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(997)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        before = torch_state(device_type)
        try:
            yield changed
            after = torch_state(device_type)
            changed += [name for name in before if before[name] != after.get(name)]
        finally:
            torch.set_default_dtype(default)
            torch.set_float32_matmul_precision(precision)


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _devices_of_torch(device_type: str, asked: list[str]) -> Iterator[tuple[Any, str, Any]]:
    """The functions of torch that ask a device or its driver, each one noting that it was asked."""
    names = {f"torch.{name}" for name in ("cpu", "cuda", "xpu", "mps", "accelerator", device_type)}
    for where in sorted(names | {"torch.backends.cpu", "torch.backends.mps"}):
        owner: Any = torch
        for part in where.split(".")[1:]:
            owner = getattr(owner, part, None)
        for name, function in list(getattr(owner, "__dict__", {}).items()):
            if isinstance(function, FunctionType) and not name.startswith("_"):
                yield owner, name, _noting(f"{where}.{name}()", function, asked)


def _noting(what: str, function: Callable[..., Any], asked: list[str]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        asked.append(what)
        return function(*args, **kwargs)

    return noting


class _Heard(threading.local):
    def __init__(self) -> None:
        self.lists: list[list[str]] = []


_heard = _Heard()
_FROM_OUTSIDE = (
    "open",
    "os.listdir",
    "os.scandir",
    "os.system",
    "subprocess.Popen",
    "ctypes.dlopen",
)


@functools.cache
def _listen() -> None:
    def hear(event: str, args: tuple[Any, ...]) -> None:
        if event in _FROM_OUTSIDE and _heard.lists:
            _heard.lists[-1].append(f"{event}({args[0]!r})" if args else event)

    sys.addaudithook(hear)  # for good: Python takes none back


class _NoVendor:
    """An import hook under which nothing new can be imported, except Python's own modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Refuse as a library does whose driver is missing."""
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "torch", "amphal"}:
            raise OSError(f"{name}.so: cannot open shared object file (a test of a broken driver)")


@contextlib.contextmanager
def broken_vendor_imports() -> Iterator[None]:
    """Importing a module that is not loaded yet fails as a vendor's does without its driver."""
    hook = _NoVendor()
    sys.meta_path.insert(0, hook)
    try:
        yield
    finally:
        sys.meta_path.remove(hook)
