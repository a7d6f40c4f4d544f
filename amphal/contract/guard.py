"""Asking a backend's functions: whatever they do, the caller gets an answer or one clear error.

A vendor's module may raise what is no ``Exception`` (``SystemExit``, a panic of an extension in
Rust), raise what cannot be printed, or ask amphal about its own device while it answers.
Only ``KeyboardInterrupt`` passes through: it is the user's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from ..errors import AmphalError, BackendError
from .op_lists import OpLists
from .records import Backend

__all__ = [
    "answering",
    "declared_lists",
    "failing_as",
    "reason_of",
    "shown",
    "vendor_scaler",
]


def reason_of(exc: BaseException) -> str:
    """The exception's type and text, whatever a vendor's class does when asked for its text."""
    try:
        text = str(exc)
    except Exception:
        text = "(its message cannot be printed)"
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def shown(value: object) -> str:
    """``repr(value)``, whatever a vendor's class does when asked for it."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"


class _Now(threading.local):
    def __init__(self) -> None:
        self.questions: set[tuple[str, str]] = set()


_now = _Now()


@contextlib.contextmanager
def answering(backend: Backend, function: str) -> Iterator[None]:
    """Within the block, this thread's backend answers; being asked the same again is an error.

    Without it a backend that asks amphal about itself would go round until the stack is full, and
    twice as often at each level where the failure is asked about too.
    """
    question = backend.device_type, function
    if question in _now.questions:
        raise BackendError(
            f"{function}() of the backend {backend.device_type!r} asked amphal about its own "
            "device while it was answering; ask the vendor's module instead"
        )
    _now.questions.add(question)
    try:
        yield
    finally:
        _now.questions.discard(question)


@contextlib.contextmanager
def failing_as(error: type[AmphalError], told: str) -> Iterator[None]:
    """Whatever is raised in the block is raised as ``error``: ``told`` and the reason."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        raise error(f"{told} {reason_of(exc)}") from exc


def declared_lists(backend: Backend, dtype: torch.dtype) -> OpLists:
    """``backend.op_lists(dtype)``, checked.

    Raises:
        BackendError: it raised, or returned something else.
    """
    told = f"op_lists() of the backend {backend.device_type!r} raised"
    with failing_as(BackendError, told), answering(backend, "op_lists"):
        lists = backend.op_lists(dtype)
    if not isinstance(lists, OpLists):
        raise BackendError(
            f"op_lists() of the backend {backend.device_type!r} must return an amphal.OpLists, "
            f"got {shown(lists)}"
        )
    return lists


def vendor_scaler(backend: Backend) -> type[torch.amp.GradScaler] | None:
    """The vendor's scaler class, or None where the backend brings none.

    Raises:
        BackendError: asking for it raised, or gave something else.
    """
    if backend.vendor_scaler is None:
        return None
    told = f"vendor_scaler() of the backend {backend.device_type!r} raised"
    with failing_as(BackendError, told):
        kind = backend.vendor_scaler()
    if not isinstance(kind, type) or not issubclass(kind, torch.amp.GradScaler):
        raise BackendError(
            f"vendor_scaler() of the backend {backend.device_type!r} must return a subclass of "
            f"torch.amp.GradScaler, got {shown(kind)}"
        )
    return kind
