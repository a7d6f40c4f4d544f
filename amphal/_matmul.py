"""float32 matmul precision: torch's process-wide setting, set for a while and put back.

A backward pass runs outside the region of its forward, so this is no part of an autocast region:
the block has to hold whole steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .errors import ArgumentError

__all__ = ["PRECISIONS", "current", "matmul_precision"]

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
    before = current()
    if before is None:
        raise ArgumentError(
            f"matmul_precision={precision!r} needs torch.set_float32_matmul_precision(), but this "
            "process uses torch.backends' fp32_precision, and torch refuses a mix. Use one of them"
        )
    newer = _newer_settings()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for owner, value in newer:
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
