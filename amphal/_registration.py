"""Kernels on dispatch keys: put there quietly, counted, and taken away without harm to threads."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from . import _compat, _opnames

__all__ = ["KernelSet", "Kernels", "temporary_names"]

GRACE = 0.1
"""Seconds for which other threads keep kernels where torch gives no handle to hold them by."""

_lock = threading.Lock()
_there: list[KernelSet] = []
# Handles on kernels that another thread may have been on its way into when they were taken away.
_retired: deque[list[Any]] = deque(maxlen=64)


class Kernels:
    """Kernels of several ops on their dispatch keys, from :meth:`put` to :meth:`take_away`."""

    def __init__(self, kernels: Mapping[tuple[str, str], Callable[..., Any]]) -> None:
        self.pairs = tuple(kernels)
        self._libraries: dict[str, Any] = {}
        self._kernels: list[tuple[Any, str, str, Any]] = []
        for (op, key), kernel in kernels.items():
            namespace, _, name = _opnames.qualified(op).partition("::")
            if namespace not in self._libraries:
                self._libraries[namespace] = _compat.kernel_library(namespace)
            self._kernels.append((self._libraries[namespace].impl, name, key, kernel))

    def put(self) -> None:
        """Register the kernels, without torch's warning that one overrides another."""
        _spend_the_warning()
        with _silence() if torch.is_warn_always_enabled() else _NOTHING:
            for put, name, key, kernel in self._kernels:
                put(name, key, kernel, True)

    def take_away(self) -> None:
        """Undo :meth:`put`."""
        for library in self._libraries.values():
            library.reset()


class KernelSet(Kernels):
    """Kernels that come and go together, for the first user and after the last.

    Two sets may have the same op: kernels of one op and key lie on each other, and any of them can
    be taken away. The uppermost is called, so all sets must give one and the same function.
    ``added`` are the pairs of op and key that have no other kernel.
    """

    def __init__(
        self,
        kernels: Mapping[tuple[str, str], Callable[..., Any]],
        added: Iterable[tuple[str, str]] = (),
    ) -> None:
        super().__init__(kernels)
        self.added = frozenset(added)
        self._count = 0

    def hold(self) -> None:
        """Have the kernels there until the matching :meth:`drop`."""
        if not self.pairs:
            return
        with _lock:
            self._count += 1
            if self._count == 1 and self not in _there:
                self.put()
                _there.append(self)

    def drop(self) -> None:
        """The counterpart of :meth:`hold`."""
        if not self.pairs:
            return
        with _lock:
            self._count -= 1
            if self._count == 0:
                self._retire()

    def _retire(self) -> None:
        if threading.active_count() > 1:
            # Another thread may wait for the GIL inside a kernel, which must not be freed under it.
            handles = [_compat.kernel_handle(_opnames.qualified(op), key) for op, key in self.pairs]
            if None in handles:
                threading.Timer(GRACE, self._retire_late).start()
                return
            _retired.append(handles)
        _there.remove(self)
        self.take_away()

    def _retire_late(self) -> None:
        with _lock:
            if self._count == 0 and self in _there:
                _there.remove(self)
                self.take_away()


def temporary_names(key: str) -> frozenset[str]:
    """The ops that have a kernel on this key only because of a set that is there now."""
    return frozenset(op for kernels in list(_there) for op, k in kernels.added if k == key)


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        yield


@functools.cache
def _spend_the_warning() -> None:
    # torch warns of the first overridden kernel in a process, whichever it is. Filters of warnings
    # belong to the whole process too, so one is set for this moment only and not at every region.
    libraries = [_compat.kernel_library("aten") for _ in range(2)]
    with _silence():
        for library in libraries:
            library.impl("relu", "AutocastPrivateUse1", _unused, True)
    for library in libraries:
        library.reset()


def _unused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("there for a moment, and not called")
