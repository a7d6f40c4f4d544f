"""For tests, of amphal and of plug-ins: pretend hardware, observe policies, check a backend."""

from __future__ import annotations

from ._simulate import simulate

__all__ = ["simulate"]
