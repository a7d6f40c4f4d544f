"""Pretend that a device is here: for decisions and for fake tensors, not for computing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from ..contract import Availability, Backend, Hardware, registry
from ..errors import ArgumentTypeError

__all__ = ["simulate"]


@contextlib.contextmanager
def simulate(hardware: Hardware, *, priority: int | None = None) -> Iterator[Backend]:
    """Within the block, the backend of ``hardware.device_type`` finds exactly this hardware.

    ``amphal.detect()`` and ``amphal.autocast`` then answer as on such a machine, and fake tensors
    of that device are cast by torch's own autocast kernels. Nothing is computed on a real device.
    Effects are process-wide and undone on exit.

    Args:
        hardware: the machine to pretend.
        priority: another priority for the backend, or None for its own.
    """
    if not isinstance(hardware, Hardware):
        raise ArgumentTypeError(
            f"simulate() takes an amphal.Hardware, got {type(hardware).__name__} ({hardware!r})"
        )
    real = registry.get_backend(hardware.device_type)
    fake = dataclasses.replace(
        real,
        priority=real.priority if priority is None else priority,
        available=lambda: Availability(True),
        probe=lambda index: dataclasses.replace(hardware, index=index),
        current_index=lambda: None,
    )
    with registry.overridden(fake):
        yield fake
