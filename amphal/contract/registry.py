"""The registry: who can serve which device type.

Built-in backends and plug-ins come through the same door, the entry points ``amphal.backends``.
They are listed once, at first use and never at import. A plug-in is imported when its device is
named, or when all of them are asked for. A backend that cannot be loaded is a row with its reason;
it raises only when the user names it.
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
    "loaded_backends",
    "on_change",
    "overridden",
    "reason_of",
    "register_backend",
    "registered_backends",
    "source_of",
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


@dataclass(frozen=True)
class _Unloaded:
    """A plug-in that nobody has asked for."""

    source: str
    entry: metadata.EntryPoint


_lock = threading.RLock()
_rows: dict[str, Registration | _Unloaded] | None = None
_loading: set[str] = set()  # under the lock, so of this thread
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


def _scan() -> dict[str, Registration | _Unloaded]:
    """A row for each entry point; no plug-in is imported."""
    entries: dict[str, dict[str, metadata.EntryPoint]] = {}
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        # By source too: a folder that is on sys.path twice is one distribution.
        entries.setdefault(entry.name, {}).setdefault(_source(entry), entry)
    rows: dict[str, Registration | _Unloaded] = {}
    for name, found in sorted(entries.items()):
        # amphal's own first: a stranger cannot take the place of a built-in backend.
        first, *others = sorted(
            found, key=lambda source: (source.split(" ")[0] != "amphal", source)
        )
        rows[name] = _Unloaded(first, found[first])
        if not others:
            continue
        if first.split(" ")[0] == "amphal":
            for source in others:
                reason = (
                    f"{name!r} is already taken by {first}; refused {found[source].value} of "
                    f"{source}: uninstall one of them"
                )
                key = f"{name} [{source}]"
                rows[key] = Registration(key, source, None, reason)
        else:
            # Neither: a choice by the alphabet would give one of them numbers of the other.
            each = [f"{found[source].value} of {source}" for source in (first, *others)]
            both = " and ".join((first, *others))
            reason = (
                f"{len(each)} distributions bring a backend for {name!r}: {' and '.join(each)}; "
                "uninstall all but one"
            )
            rows[name] = Registration(name, both, None, reason)
    return rows


def _table() -> Mapping[str, Registration | _Unloaded]:
    global _rows
    if _rows is None:
        with _lock:
            if _rows is None:
                _rows = _scan()
    return _rows


def _loaded(name: str, row: _Unloaded) -> Registration:
    """The row with its backend imported, or with the reason why there is none."""
    try:
        return Registration(name, row.source, _load(row.entry))
    except KeyboardInterrupt:  # the user's; the next question imports again
        raise
    except BaseException as exc:  # a broken plug-in must not break the others
        reason = reason_of(exc)
        if isinstance(exc, ModuleNotFoundError) and exc.name == "amphal.backends":
            reason += (
                ". The folder you started from holds a checkout of amphal that hides the "
                "installed one: start elsewhere, or install the checkout (pip install -e .)"
            )
        return Registration(name, row.source, None, reason)


def _row(name: str) -> Registration | None:
    """The row of this name, its plug-in imported; None if there is none."""
    row = _table().get(name)
    if not isinstance(row, _Unloaded):
        return row
    with _lock:
        row = _table().get(name)
        if not isinstance(row, _Unloaded):  # another thread was first
            return row
        if name in _loading:  # the lock is this thread's: the plug-in's import came back here
            raise BackendError(
                f"the backend {name!r} asked for itself while it was being imported; "
                "move what its module runs at import time into its functions"
            )
        _loading.add(name)
        try:
            loaded = _loaded(name, row)
        finally:
            _loading.remove(name)
        _put(name, loaded)
        return loaded


def registered_backends() -> Mapping[str, Registration]:
    """The registry now, read-only: device type to :class:`Registration`, failures included.

    Imports every plug-in that is installed.
    """
    rows = ((name, _row(name)) for name in list(_table()))
    return MappingProxyType({name: row for name, row in rows if row is not None})


def loaded_backends() -> tuple[list[Backend], list[str]]:
    """The built-in backends and those imported so far, and the names of the others.

    For messages: imports no plug-in.
    """
    found, others = [], []
    for name, row in list(_table().items()):
        if isinstance(row, _Unloaded) and row.source.split(" ")[0] != "amphal":
            others.append(name)
            continue
        loaded = _row(name)
        if loaded is not None and loaded.backend is not None:
            found.append(loaded.backend)
    return found, sorted(others)


def known_names() -> list[str]:
    """The device types that have a row, sorted. Imports no plug-in."""
    return sorted(name for name in _table() if " " not in name)


def source_of(name: str) -> str:
    """Where the backend of this name came from; empty if there is none. Imports no plug-in."""
    row = _table().get(name)
    return "" if row is None else row.source


def _put(name: str, row: Registration | _Unloaded | None) -> None:
    """Set a row or remove it. A new dict each time: others may be iterating over the old one."""
    global _rows
    rows = dict(_table())
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
    """The backend of ``device_type``. Imports its plug-in, and no other.

    Raises:
        UnknownDeviceError: nothing is registered under this name.
        BackendError: something is, but it could not be loaded; the message says why.
    """
    if not isinstance(device_type, str):
        raise ArgumentTypeError(
            f"device_type must be a string such as 'cuda', got {type(device_type).__name__} "
            f"({device_type!r})"
        )
    row = _row(device_type)
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
        old = _table().get(backend.device_type)
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
        found = _row(device_type) if isinstance(device_type, str) else None
        backend = get_backend(device_type) if found is None else found.backend
        _put(device_type, None)
    _changed()
    return backend


@contextlib.contextmanager
def overridden(backend: Backend) -> Iterator[None]:
    """Within the block ``backend`` serves its device type; then the row is as it was."""
    with _lock:
        name = backend.device_type
        old = _table().get(name)
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
