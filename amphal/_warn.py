"""Warnings that point at the user's line, wherever in this package they arise."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn"]


def warn(message: str, category: type[Warning]) -> None:
    """Warn as if the first frame outside this package had."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
