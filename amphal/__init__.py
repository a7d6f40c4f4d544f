"""amphal: one mixed-precision front end for every PyTorch device.

A training script says :func:`detect`, :func:`autocast` and :class:`GradScaler` and never names a
device; what a device can do is declared by its backend, in one file.

Errors are in :mod:`amphal.errors`; what the author of a backend needs is in
:mod:`amphal.contract`, and the suite that proves a backend is in :mod:`amphal.testing`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._autocast import autocast
from ._version import __version__ as __version__
from .errors import AmphalError, PrecisionWarning

if TYPE_CHECKING:
    from ._autocast import custom_bwd, custom_fwd, hold_casts, set_precision
    from ._casting import op_lists, register_autocast_op
    from ._front import Plan, detect
    from ._precast import full_precision_state_dict, precast_, undo_precast_
    from ._scaler import GradMonitor, GradScaler
    from ._trace import find_nonfinite, trace
    from ._tune import tune
    from .contract import Hardware, OpLists, known_hardware

# Imported at its first use, so that ``import amphal`` stays cheap in programs that may not use it.
# The region is not among these: Dynamo must find it when it traces.
_AT_FIRST_USE = {
    "GradMonitor": "_scaler",
    "GradScaler": "_scaler",
    "Hardware": "contract",
    "OpLists": "contract",
    "Plan": "_front",
    "custom_bwd": "_autocast",
    "custom_fwd": "_autocast",
    "detect": "_front",
    "find_nonfinite": "_trace",
    "full_precision_state_dict": "_precast",
    "hold_casts": "_autocast",
    "known_hardware": "contract",
    "op_lists": "_casting",
    "precast_": "_precast",
    "register_autocast_op": "_casting",
    "set_precision": "_autocast",
    "trace": "_trace",
    "tune": "_tune",
    "undo_precast_": "_precast",
}
_PUBLIC_MODULES = frozenset(["contract", "integrations", "testing"])


def __getattr__(name: str) -> Any:
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f".{name}", __name__)
    module = _AT_FIRST_USE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_moved(name)}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def _moved(name: str) -> str:
    """Where a name is that one might look for here."""
    from . import errors

    if name in errors.__all__:
        return f"; errors and warnings are in amphal.errors: amphal.errors.{name}"
    if name.startswith("_"):
        return ""
    contract = importlib.import_module(".contract", __name__)
    if name in contract.__all__:
        return f"; it is for those who write a backend: amphal.contract.{name}"
    return errors.did_you_mean(name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_AT_FIRST_USE})


__all__ = [
    "AmphalError",
    "GradMonitor",
    "GradScaler",
    "Hardware",
    "OpLists",
    "Plan",
    "PrecisionWarning",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "detect",
    "find_nonfinite",
    "full_precision_state_dict",
    "hold_casts",
    "known_hardware",
    "op_lists",
    "precast_",
    "register_autocast_op",
    "set_precision",
    "trace",
    "tune",
    "undo_precast_",
]
