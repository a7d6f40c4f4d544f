"""float32 matmul precision: torch's process-wide setting, set for a while and put back.

A backward pass runs outside the region of its forward, so this is no part of an autocast region:
the block has to hold whole steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ArgumentError

__all__ = ["PRECISIONS", "current", "keep", "matmul_precision"]

PRECISIONS = ("highest", "high", "medium")
"""What ``torch.set_float32_matmul_precision`` takes."""


def current() -> str | None:
    """torch's setting now; None where torch's newer setting, one a backend, replaces it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@contextmanager
def matmul_precision(precision: str | None) -> Iterator[None]:
    """Within the block, float32 matmuls of the whole process have this precision. None: as it is.

    Raises:
        ArgumentError: torch's newer ``fp32_precision`` is in use, which this one would overwrite.
    """
    if precision is None:
        yield
        return
    with _lock:
        block = _start(precision)
    try:
        yield
    finally:
        with _lock:
            _close(block)


def keep() -> Callable[[], None]:
    """Gives what puts the settings of now back, if they are others then."""
    before, newer = current(), _newer_settings()

    def undo() -> None:
        if before is not None and current() != before:
            torch.set_float32_matmul_precision(before)
        for owner, value in newer:
            if owner.fp32_precision != value:
                owner.fp32_precision = value

    return undo


@dataclass(eq=False)
class _Block:
    """What was set before a block."""

    before: str
    newer: list[tuple[Any, str]]


_lock = threading.Lock()
_open: list[_Block] = []
"""The blocks that are open in any thread, in the order of their starts."""


def _start(precision: str) -> _Block:
    before = current()
    if before is None:
        raise ArgumentError(
            f"matmul_precision={precision!r} needs torch.set_float32_matmul_precision(), but this "
            "process uses torch.backends' fp32_precision, and torch refuses a mix. Use one of them"
        )
    block = _Block(before, _newer_settings())
    torch.set_float32_matmul_precision(precision)
    _open.append(block)
    return block


def _close(block: _Block) -> None:
    """Put back what was before it; where a later block is still open, that one does so in its turn.

    Threads may leave blocks in another order than they entered them, and the setting is the
    process's: what was there before all of them has to be there after all of them.
    """
    place = _open.index(block)
    _open.remove(block)
    if place < len(_open):
        _open[place].before, _open[place].newer = block.before, block.newer
        return
    torch.set_float32_matmul_precision(block.before)
    for owner, value in block.newer:
        owner.fp32_precision = value


def _newer_settings() -> list[tuple[Any, str]]:
    """What the older setter writes through to from torch 2.9 on, and would not put back."""
    owners = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    found = []
    for owner in owners:
        try:
            found.append((owner, owner.fp32_precision))  # type: ignore[union-attr]
        except AttributeError:
            continue
    return found
