"""The settings of the thread and the process that a step, or an interrupt of it, may change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .._autocast import Region, depth, innermost
from .._casting import policy
from .._torch import matmul, private

__all__ = ["keep_settings"]


_CUDNN = ("enabled", "benchmark", "deterministic")


def keep_settings(device: torch.device) -> Callable[[], None]:
    """Gives what puts the settings of now back: those that are others then."""
    undo = [
        matmul.keep(),
        _keep(torch.is_grad_enabled, torch.set_grad_enabled),
        _keep(torch.get_num_threads, torch.set_num_threads),
        _keep(_deterministic, _put_deterministic),
        *(_keep_attribute(torch.backends.cudnn, name) for name in _CUDNN),
        _keep_autocast(device),
    ]

    def put_back() -> None:
        for one in undo:
            one()

    return put_back


def _keep(get: Callable[[], Any], put: Callable[[Any], Any]) -> Callable[[], None]:
    before = get()

    def undo() -> None:
        if get() != before:
            put(before)

    return undo


def _keep_attribute(owner: Any, name: str) -> Callable[[], None]:
    return _keep(partial(getattr, owner, name), partial(setattr, owner, name))


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _put_deterministic(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _keep_autocast(device: torch.device) -> Callable[[], None]:
    """This thread's autocast state, on the device and on the host.

    An interrupt may fall between the change of a setting and the point from which a region puts it
    back, in amphal's regions and in torch's.
    """
    types = {device.type, torch.get_rng_state().device.type}
    states = [
        _keep(partial(get, kind), partial(put, kind))
        for kind in sorted(filter(private.autocast_available, types))
        for get, put in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ]
    states.append(_keep(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled))
    regions, policies, nesting = depth(), len(policy.owners()), _nesting()

    def undo() -> None:
        for owner in reversed(policy.owners()[policies:]):
            owner.__exit__()
        while depth() > regions:
            Region.__exit__(innermost())
        for state in states:
            state()
        if _nesting() > nesting:
            private.lower_nesting(nesting)

    return undo


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
