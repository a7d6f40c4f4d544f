"""On which device types a loss of now may come from a float16 region; a scaler asks it."""

from __future__ import annotations

__all__ = ["float16_regions"]

float16_regions: set[str] = set()
"""Device types: added when a float16 region is made or entered there, removed when an outermost
region of another dtype is entered. For all threads, since a model's replicas may run in others."""
