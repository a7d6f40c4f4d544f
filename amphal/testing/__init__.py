"""For tests, of amphal and of plug-ins: pretend hardware, observe policies, check a backend."""

from __future__ import annotations

from ._observe import observe_policy
from ._simulate import simulate

__all__ = ["observe_policy", "simulate"]
