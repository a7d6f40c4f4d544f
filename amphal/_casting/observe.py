"""See each call of a listed op before autocast casts its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .._torch import private
from ..contract import is_defined
from . import installed, policy
from .live_lists import op_lists

__all__ = ["Observer", "observed"]

Observer = Callable[[str, str, Callable[[], Any], Any], Any]
"""``(op, policy, run, inputs)`` to the op's result, which ``run()`` gives."""


@contextlib.contextmanager
def observed(observer: Observer, ops: Iterable[str], devices: Iterable[str]) -> Iterator[None]:
    """Have ``observer`` called for each call of ``ops``, and of all listed ops, in this thread.

    The kernels that regions with ``ops=`` use are put on the autocast keys of these devices; they
    do what autocast would have done. A region need not be amphal's.
    """
    sets = []
    for device in devices:
        key = private.autocast_key(device)
        lists = op_lists(device, torch.get_autocast_dtype(device))
        known = policy.Policy(device, torch.get_autocast_dtype(device), {}, False, {})
        names = {op for op in {*dict(lists), *ops} if is_defined(op)}
        kernels = {(op, key): policy.kernel_of(op, key, known) for op in names}
        added = [pair for pair in kernels if pair[0] not in known.torchs]
        sets.append(installed.KernelSet(kernels, added=added))
    with contextlib.ExitStack() as undo:
        for kernel_set in sets:
            kernel_set.hold()
            undo.callback(kernel_set.drop)
        before = policy.observe(observer)
        undo.callback(policy.observe, before)
        yield
