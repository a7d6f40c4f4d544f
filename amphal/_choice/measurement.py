"""``Measurement``: what was measured of one candidate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """What :func:`amphal.tune` found of one candidate."""

    candidate: str
    """Its name: ``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"``, ``"fp32:medium"`` …"""
    seconds: float | None
    """The median time of a step; None where it was never timed."""
    ratio: float | None
    """Its time as a multiple of the shortest median, round by round; None where never timed."""
    spread: float | None
    """How far the middle half of its times lies apart, as a part of the median; None if untimed."""
    rounds: int
    """How many interleaved rounds it took part in."""
    loss: float | None
    """Of the same early step for all candidates, from the same state; None without a loss."""
    dropped: bool = False
    """True where it could not be chosen."""
    note: str = ""
    """Why it was dropped, or stopped before the end."""

    def to_dict(self) -> dict[str, Any]:
        """The row as plain JSON-able values."""
        return asdict(self)
