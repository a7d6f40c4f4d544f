"""Engines that own mixed precision: while one runs, an autocast region steps aside.

An engine such as DeepSpeed's holds the parameters in its own precision and scales the loss itself;
a region inside would cast a second time and against it. The integrations say when an engine runs.
Ownership belongs to the process, not to a thread, since a backward pass runs on threads of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .._torch import private
from .._warnings import warn
from ..errors import EngineWarning

__all__ = ["Owner", "active", "running"]


class Owner:
    """An engine that owns mixed precision."""

    def __init__(self, name: str) -> None:
        self.name = name
        """What the note calls it, such as "the DeepSpeed engine (bf16)"."""
        self._told = False

    def tell(self) -> None:
        """Note, once for this engine, that an autocast region steps aside for it."""
        if not self._told:
            self._told = True
            warn(
                f"{self.name} owns mixed precision: amphal.autocast steps aside inside it. "
                "Remove the region, or leave mixed precision out of the engine's settings",
                EngineWarning,
            )


active: list[Owner] = []
"""The engines that run now, the innermost last. Regions look at it at each entry."""


@contextmanager
def running(owner: Owner) -> Iterator[None]:
    """``owner`` runs in this block."""
    active.append(owner)
    try:
        yield
    finally:
        active.remove(owner)


private.not_as_frames(__name__)
