"""The registry: who can serve which device type.

Built-in backends and plug-ins come through the same door, the entry points ``amphal.backends``.
They are scanned once, at first use and never at import. A backend that cannot be loaded is a row
with its reason; it raises only when the user names it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType

from ..errors import (
    AmphalError,
    ArgumentTypeError,
    BackendError,
    DuplicateBackendError,
    UnknownDeviceError,
    did_you_mean,
)
from .guard import answering, reason_of, shown
from .records import PRECISIONS, Availability, Backend

__all__ = [
    "ENTRY_POINT_GROUP",
    "Registration",
    "availability",
    "get_backend",
    "known_names",
    "on_change",
    "overridden",
    "reason_of",
    "register_backend",
    "registered_backends",
    "unregister_backend",
]

ENTRY_POINT_GROUP = "amphal.backends"


@dataclass(frozen=True)
class Registration:
    """One row of the registry: a backend, or the reason why there is none."""

    name: str
    """The device type; for a refused duplicate, the device type and where it came from."""
    source: str
    """Where it came from: a distribution with its version, or ``register_backend()``."""
    backend: Backend | None
    error: str = ""
    """Why there is no backend; empty where there is one."""


_lock = threading.RLock()
_rows: dict[str, Registration] | None = None
_scanning = False
_listeners: list[Callable[[], None]] = []


def on_change(callback: Callable[[], None]) -> None:
    """Call ``callback`` whenever the registry changes, for caches that depend on it."""
    _listeners.append(callback)


def _changed() -> None:
    for callback in _listeners:
        callback()


def _load(entry: metadata.EntryPoint) -> Backend:
    loaded = entry.load()
    if not isinstance(loaded, Backend):
        raise ArgumentTypeError(
            f"{entry.value} is {type(loaded).__name__}, not an amphal.contract.Backend; "
            "an entry point must name a Backend instance"
        )
    if loaded.device_type != entry.name:
        raise ArgumentTypeError(
            f"the entry point is named {entry.name!r} and its backend {loaded.device_type!r}; "
            "they must be the same"
        )
    return loaded


def _source(entry: metadata.EntryPoint) -> str:
    dist = entry.dist
    # A folder without METADATA is a distribution without a name.
    return f"{dist.name} {dist.version}" if dist is not None and dist.name else entry.value


def _scan() -> dict[str, Registration]:
    rows: dict[str, Registration] = {}
    entries = list(metadata.entry_points(group=ENTRY_POINT_GROUP))
    # amphal's own first, then by name: a stranger cannot take the place of a built-in backend.
    entries.sort(key=lambda e: (_source(e).split(" ")[0] != "amphal", _source(e), e.name))
    for entry in entries:
        source = _source(entry)
        if entry.name in rows:
            first = rows[entry.name].source
            reason = (
                f"{entry.name!r} is already taken by {first}; refused {entry.value} of {source}: "
                "uninstall one of them"
            )
            key = f"{entry.name} [{source}]"
            rows[key] = Registration(key, source, None, reason)
            continue
        try:
            rows[entry.name] = Registration(entry.name, source, _load(entry))
        except KeyboardInterrupt:  # the user's; the next question scans again
            raise
        except BaseException as exc:  # a broken plug-in must not break the others
            reason = reason_of(exc)
            if isinstance(exc, ModuleNotFoundError) and exc.name == "amphal.backends":
                reason += (
                    ". The folder you started from holds a checkout of amphal that hides the "
                    "installed one: start elsewhere, or install the checkout (pip install -e .)"
                )
            rows[entry.name] = Registration(entry.name, source, None, reason)
    return rows


def _registry() -> dict[str, Registration]:
    global _rows, _scanning
    if _rows is None:
        with _lock:
            if _scanning:  # the lock is this thread's: a backend's import came back here
                raise BackendError(
                    "a backend asked for the registry while it was being imported; "
                    "move what its module runs at import time into its functions"
                )
            if _rows is None:
                _scanning = True
                try:
                    _rows = _scan()
                finally:
                    _scanning = False
    return _rows


def registered_backends() -> Mapping[str, Registration]:
    """The registry now, read-only: device type to :class:`Registration`, failures included."""
    return MappingProxyType(_registry())


def known_names() -> list[str]:
    """The device types that have a row, sorted."""
    return sorted(name for name in _registry() if " " not in name)


def _put(name: str, row: Registration | None) -> None:
    """Set a row or remove it. A new dict each time: others may be iterating over the old one."""
    global _rows
    rows = dict(_registry())
    if row is None:
        rows.pop(name, None)
    else:
        rows[name] = row
    _rows = rows


def _precision_hint(name: str) -> str:
    """Said where a precision was given in the place of the device, which comes first."""
    if name not in PRECISIONS:
        return ""
    return f" {name!r} is a precision: name it, as in autocast(dtype=...), detect(precision=...)."


def get_backend(device_type: str) -> Backend:
    """The backend of ``device_type``.

    Raises:
        UnknownDeviceError: nothing is registered under this name.
        BackendError: something is, but it could not be loaded; the message says why.
    """
    if not isinstance(device_type, str):
        raise ArgumentTypeError(
            f"device_type must be a string such as 'cuda', got {type(device_type).__name__} "
            f"({device_type!r})"
        )
    row = _registry().get(device_type)
    if row is None:
        known = known_names()
        raise UnknownDeviceError(
            f"no backend is registered for device type {device_type!r}; "
            f"registered: {', '.join(known) or 'none (is amphal installed?)'}."
            f"{_precision_hint(device_type) or did_you_mean(device_type, known)} "
            f"A plug-in adds one by the entry point group {ENTRY_POINT_GROUP!r} or "
            "amphal.contract.register_backend()"
        )
    if row.backend is None:
        raise BackendError(f"the backend {device_type!r} of {row.source} failed: {row.error}")
    return row.backend


def register_backend(backend: Backend, *, replace: bool = False) -> None:
    """Register ``backend`` for its device type, in this process.

    Args:
        backend: the record; it was validated when it was built.
        replace: take the place of a backend that is already registered.

    Raises:
        ArgumentTypeError: not a :class:`Backend`.
        DuplicateBackendError: the device type is taken and ``replace`` is false; nothing changed.
    """
    if not isinstance(backend, Backend):
        raise ArgumentTypeError(
            f"register_backend() takes an amphal.contract.Backend, got {type(backend).__name__}"
        )
    with _lock:
        old = _registry().get(backend.device_type)
        if old is not None and not replace:
            raise DuplicateBackendError(
                f"device type {backend.device_type!r} is already registered by {old.source}; "
                f"refused {backend.probe.__module__}. Pass replace=True to take its place"
            )
        row = Registration(backend.device_type, "register_backend()", backend)
        _put(backend.device_type, row)
    _changed()


def unregister_backend(device_type: str) -> Backend | None:
    """Take a backend out of this process's registry and return it (None if it was a failed row).

    Raises:
        UnknownDeviceError: nothing is registered under this name.
    """
    with _lock:
        found = _registry().get(device_type) if isinstance(device_type, str) else None
        backend = get_backend(device_type) if found is None else found.backend
        _put(device_type, None)
    _changed()
    return backend


@contextlib.contextmanager
def overridden(backend: Backend) -> Iterator[None]:
    """Within the block ``backend`` serves its device type; then the row is as it was."""
    with _lock:
        name = backend.device_type
        old = _registry().get(name)
        _put(name, Registration(name, "simulated" if old is None else old.source, backend))
    _changed()
    try:
        yield
    finally:
        with _lock:
            _put(name, old)
        _changed()


def availability(backend: Backend) -> Availability:
    """Ask a backend whether its device is there; an exception in its answer is a reasoned "no"."""
    try:
        with answering(backend, "available"):
            answer = backend.available()
    except KeyboardInterrupt:
        raise
    except AmphalError as exc:
        return Availability(False, str(exc) or type(exc).__name__)
    except BaseException as exc:  # it promised not to raise; a broken driver breaks promises
        return Availability(False, f"available() of the backend raised {reason_of(exc)}")
    if not isinstance(answer, Availability):
        return Availability(
            False,
            f"available() of the backend returned {shown(answer)}, not an Availability",
        )
    return answer
