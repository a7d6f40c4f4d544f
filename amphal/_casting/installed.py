"""Kernels on dispatch keys: put there quietly, counted, and taken away without harm to threads."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from .._torch import private
from ..contract import op_names

__all__ = ["KernelSet", "Kernels", "linger", "temporary_names"]

GRACE = 0.1
"""Seconds for which other threads keep kernels where torch gives no handle to hold them by."""

_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    # A thread that held the lock is not there in the child, which leaves its regions with it.
    os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))
# The kernels that are there, with the set that they belong to; None: a rule taken back.
_there: dict[Kernels, KernelSet | None] = {}
# Handles on kernels that another thread may have been on its way into when they were taken away.
_retired: deque[list[Any]] = deque(maxlen=64)


class Kernels:
    """Kernels of several ops on their dispatch keys, from :meth:`put` to :meth:`take_away`."""

    def __init__(self, kernels: Mapping[tuple[str, str], Callable[..., Any]]) -> None:
        self.pairs = tuple(kernels)
        self._libraries: dict[str, Any] = {}
        self._kernels: list[tuple[Any, str, str, Any]] = []
        for (op, key), kernel in kernels.items():
            namespace, _, name = op_names.qualified(op).partition("::")
            if namespace not in self._libraries:
                self._libraries[namespace] = private.kernel_library(namespace)
            self._kernels.append((self._libraries[namespace].impl, name, key, kernel))

    def put(self) -> None:
        """Register the kernels, without torch's warning that one overrides another."""
        _spend_the_warning()
        with _silence() if torch.is_warn_always_enabled() else _NOTHING:
            try:
                for put, name, key, kernel in self._kernels:
                    put(name, key, kernel, True)
            except BaseException:  # an interrupt too
                self.take_away()
                raise

    def take_away(self) -> None:
        """Undo :meth:`put`."""
        for library in self._libraries.values():
            library.reset()


class KernelSet:
    """Kernels that come and go together, for the first user and after the last.

    Two sets may have the same op: kernels of one op and key lie on each other, and any of them can
    be taken away. The uppermost is called, so all sets must give one and the same function.
    ``added`` are the pairs of op and key that torch has no kernel for. Torch passes by autocast for
    them, and a call that is on its way while its kernel is taken away dies of it (torch looks
    whether there is a kernel, and then which). So they go only when no other thread runs, and must
    do what torch does where they are not wanted.
    """

    def __init__(
        self,
        kernels: Mapping[tuple[str, str], Callable[..., Any]],
        added: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.added = frozenset(added)
        self.pairs = tuple(kernels)
        self._count = 0
        self._over = Kernels({pair: k for pair, k in kernels.items() if pair not in self.added})
        self._new = Kernels({pair: k for pair, k in kernels.items() if pair in self.added})
        self._parts = tuple(part for part in (self._over, self._new) if part.pairs)

    @property
    def held(self) -> bool:
        """Whether somebody needs the kernels now."""
        return self._count > 0

    def hold(self) -> None:
        """Have the kernels there until the matching :meth:`drop`."""
        if not self.pairs:
            return
        with _lock:
            self._count += 1
            if self._count > 1:
                return
            lacking = [part for part in self._parts if part not in _there]
            try:
                for part in lacking:
                    part.put()
                    _there[part] = self
            except BaseException:  # an interrupt too
                self._count -= 1
                for part in lacking:
                    _there.pop(part, None)
                    part.take_away()
                raise

    def drop(self) -> None:
        """The counterpart of :meth:`hold`."""
        if not self.pairs:
            return
        with _lock:
            self._count -= 1
            if self._count == 0:
                self._retire()
                _sweep()

    def _retire(self) -> None:
        if self._over not in _there:
            return
        if _other_threads():
            # Another thread may wait for the GIL inside a kernel, which must not be freed under it.
            pairs = self._over.pairs
            handles = [private.kernel_handle(op_names.qualified(op), key) for op, key in pairs]
            if None in handles:
                _Late(GRACE, self._retire_late).start()
                return
            _retired.append(handles)
        del _there[self._over]
        self._over.take_away()

    def _retire_late(self) -> None:
        with _lock:
            if self._count == 0 and self._over in _there:
                del _there[self._over]
                self._over.take_away()


class _Late(threading.Timer):
    """A thread of this module, which calls no op."""


def _other_threads() -> int:
    """How many threads beside this one may be calling ops, of those that Python knows."""
    if threading.active_count() == 1:
        return 0
    mine = threading.current_thread()
    return sum(t is not mine and not isinstance(t, _Late) for t in threading.enumerate())


def linger(kernels: Kernels) -> None:
    """Take kernels of ops away that have no other, now or when no other thread runs."""
    with _lock:
        _there[kernels] = None
        _sweep()


def _sweep() -> None:
    """Take away what nobody holds, if no other thread can be on its way into it."""
    if _other_threads():
        return
    for part, owner in list(_there.items()):
        if owner is None or owner._count == 0:
            del _there[part]
            part.take_away()


def temporary_names(key: str, held: bool = False) -> frozenset[str]:
    """The ops that have a kernel on this key only because of a region that is, or was, entered.

    ``held``: only those of a region that is entered now.
    """
    names: set[str] = set()
    for part, owner in list(_there.items()):
        entered = owner is not None and owner._count > 0
        if (owner is None or part is owner._new) and (entered or not held):
            names.update(op for op, k in part.pairs if k == key)
    return frozenset(names)


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
    libraries = [private.kernel_library("aten") for _ in range(2)]
    with _silence():
        for library in libraries:
            library.impl("relu", "AutocastPrivateUse1", _unused, True)
    for library in libraries:
        library.reset()


def _unused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("there for a moment, and not called")


private.not_as_frames(__name__)
