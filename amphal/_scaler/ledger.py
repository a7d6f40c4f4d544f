"""Which gradients are not multiplied with the scale of now: unscaled already, or scaled before.

A gradient is known by its identity and its version: backward passes and writes by the user move the
version. The kernels that unscale do not, so an entry is made after them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from .._torch import private

__all__ = ["Entry", "Ledger"]


class Entry(NamedTuple):
    """What one gradient was multiplied with when it was noted."""

    grad: weakref.ref[Tensor]
    version: int
    factor: Tensor | None
    """A float32 scalar tensor; None: the gradient is unscaled."""
    moment: tuple[int, int]
    """How many updates and calls of ``scale`` came before."""


class Ledger:
    """Entries of gradients, held weakly."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}

    def note(
        self, params: Iterable[Tensor], factor: Tensor | None, moment: tuple[int, int]
    ) -> None:
        """The gradients of ``params`` are multiplied with ``factor`` now."""
        for param in params:
            grad = param.grad
            if grad is not None:
                self._entries[id(grad)] = Entry(weakref.ref(grad), grad._version, factor, moment)

    def alive(self) -> bool:
        """Whether any noted gradient still exists; forgets the others."""
        if self._entries:
            self._entries = {k: e for k, e in self._entries.items() if e.grad() is not None}
        return bool(self._entries)

    def find(self, grad: Tensor, moment: tuple[int, int]) -> Entry | None:
        """What was noted of ``grad``, if it still holds.

        A write that moved the version in the very moment, with no loss scaled in between, is the
        user's own (clipping by hand): it does not change the factor.
        """
        entry = self._entries.get(id(grad))
        if entry is None or entry.grad() is not grad:
            return None
        return entry if entry.version == grad._version or entry.moment == moment else None


private.not_as_frames(__name__)
