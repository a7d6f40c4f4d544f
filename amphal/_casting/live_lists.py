"""Op lists of the running torch: the declared tables, held against the live dispatcher."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._torch import private
from ..contract import OpLists, declared_lists, op_names, registry, spelling
from ..errors import ArgumentError
from . import installed
from . import rules as op_rules

__all__ = ["listed_live", "op_lists", "reconcile"]


def op_lists(device_type: Any, dtype: Any = None) -> OpLists:
    """The casting policy of a device's autocast, true for the torch that runs.

    The names are those that the backend declares, without the ones that this torch lacks or whose
    extension is not loaded. Names that the live dispatcher casts and no table knows are in
    ``unclassified``. The device need not be here.

    Args:
        device_type: ``"cuda"``, ``"cuda:0"``, a ``torch.device``.
        dtype: the region's dtype, or None for torch's default on this device type.

    Raises:
        UnknownDeviceError: no backend is registered for it.
        ArgumentError: torch has no autocast for it.
    """
    name, _ = spelling.named_device(device_type, what="device_type")
    backend = registry.get_backend(name)
    name = backend.device_type
    if not private.autocast_available(name):
        raise ArgumentError(f"torch has no autocast for device type {name!r}")
    low = torch.get_autocast_dtype(name) if dtype is None else spelling.named_precision(dtype)
    declared = declared_lists(backend, low)
    live = listed_live(name)
    if op_rules.completes(name):
        # A region on the device casts what is declared: amphal adds what its extension leaves out.
        # Those kernels are for both dtypes: an op that only the other one casts passes by here.
        live -= op_rules.installed(name)
        live |= frozenset(filter(op_names.is_defined, dict(declared)))
    rules = op_rules.registered_policies(name)
    for op, policy in rules.items():
        declared = declared.add(**{policy: [op]})
    # A region may have put a kernel for an op with a rule too, which makes it no temporary one.
    return reconcile(declared, live | frozenset(rules))


def listed_live(device_type: str) -> frozenset[str]:
    """The ops that torch and its extensions have on this device's autocast key now."""
    key = private.autocast_key(device_type)
    names = (n.removeprefix("aten::") for n in private.registered_ops(key))
    mine = installed.temporary_names(key)
    return frozenset(n for n in names if op_names.is_defined(n) and n not in mine)


def reconcile(declared: OpLists, live: Iterable[str]) -> OpLists:
    """``declared`` without the names that are not live, and the live names that it lacks."""
    live = frozenset(live)
    sets = {policy: frozenset(ops) & live for policy, ops in declared.to_dict().items()}
    sets["unclassified"] = live - frozenset(dict(declared))
    return OpLists(**sets)
