"""What a run of the conformance suite is about: one backend, its device or a pretended one."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .. import _detect, _registry
from .._backend import Availability, Backend, Hardware
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
    def at_work(self, dtype: torch.dtype | None = None) -> Iterator[_detect.Plan]:
        """The plan of the device; where it is absent, that of a record, for fake tensors.

        The record is the first one that can do ``dtype``.
        """
        if self.availability:
            yield _detect.detect(self.device_type)
            return
        from torch._subclasses import FakeTensorMode

        records = [r for r in self.records if self._can(r, dtype)] or self.records
        with simulate(records[0]), FakeTensorMode(), torch.no_grad():
            yield _detect.detect(self.device_type)

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
    availability = _registry.availability(backend)
    records = [*more, *_known(backend.device_type)]
    if availability:
        with contextlib.suppress(Exception):  # test_probe_reads_facts shows what is wrong
            records.insert(0, backend.probe(None))
    records.append(Hardware(backend.device_type, "a device that nobody has heard of"))
    return Subject(backend, availability, tuple(records), source)


def _known(device_type: str) -> list[Hardware]:
    from .._hardware import known_hardware

    rows = (row.hardware for row in known_hardware().values())
    return [hardware for hardware in rows if hardware.device_type == device_type]


def precision_named(subject: Subject, dtype: torch.dtype) -> _detect.Plan:
    """The plan for a dtype that is named, without the warning that it may be slow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        return _detect.detect(subject.device_type, precision=dtype)


def torch_state(device_type: str) -> dict[str, Any]:
    """What a pure function, or a region that was left, must leave as it was."""
    state: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "the CPU's random state": bytes(torch.get_rng_state().tolist()),
        "the autocast cache": torch.is_autocast_cache_enabled(),
    }
    with contextlib.suppress(RuntimeError):  # a device type that this process doesn't know
        state["autocast"] = torch.is_autocast_enabled(device_type)
        state["the autocast dtype"] = torch.get_autocast_dtype(device_type)
    return state


@contextlib.contextmanager
def another_machine() -> Iterator[None]:
    """What a function could read of this machine looks different: a pure one doesn't notice."""
    environment, default = dict(os.environ), torch.get_default_dtype()
    functions = ("machine", "processor", "system", "release", "node", "platform", "mac_ver")
    real = {name: getattr(platform, name) for name in functions}
    try:
        os.environ.clear()
        for name in functions:
            answer: Any = ("99.0", ("", "", ""), "other") if name == "mac_ver" else "other"
            setattr(platform, name, lambda *_, answer=answer, **__: answer)
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_default_dtype(default)
        for name, function in real.items():
            setattr(platform, name, function)
        os.environ.update(environment)


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
