"""Autocast's cache of cast weights, dropped after each step of any optimizer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["drop_casts_after_each_step"]


@functools.cache
def drop_casts_after_each_step() -> None:
    """Install the hook, once a process: when the first region or scaler is made.

    The hook is global, so it holds for regions that other libraries open, and for optimizers
    that step without a scaler.
    """
    register_optimizer_step_post_hook(_drop_casts)


def _drop_casts(optimizer: Any, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # the call would break the graph of a compiled step
    # One C call, outside of regions too: the cache belongs to all threads, and a region of another
    # thread may hold casts of the weights that have just changed.
    torch.clear_autocast_cache()
