"""amphal: one mixed-precision front end for every PyTorch device.

A training script says :func:`detect`, :class:`autocast` and :class:`GradScaler` and never names a
device; what a device can do is declared by its backend, in one file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._autocast import autocast
from .errors import (
    AmphalError,
    AmphalWarning,
    ArgumentError,
    ArgumentTypeError,
    BackendError,
    BannedOpError,
    DeviceNotAvailableError,
    DuplicateBackendError,
    MissingCallError,
    MissingExtraError,
    MissingStateKeyError,
    NonFiniteGradientError,
    OpPolicyError,
    OwnerWarning,
    PrecastError,
    PrecisionWarning,
    RegionStateError,
    ScaleCollapseError,
    ScalerArgumentError,
    ScalerStateError,
    StateDictError,
    TorchTooOldError,
    TuneError,
    UnknownDeviceError,
    UnsupportedPrecisionError,
)

if TYPE_CHECKING:
    from ._backend import Availability, Backend, DtypeSupport, Hardware, ScalerSupport
    from ._custom_function import custom_bwd, custom_fwd
    from ._detect import detect
    from ._hardware import KnownHardware, known_hardware
    from ._install import AutocastOp, register_autocast_op
    from ._measured import Measurement
    from ._monitor import GradHealth, GradMonitor
    from ._oplists import OpLists
    from ._ops import op_lists
    from ._outcome import StepOutcome
    from ._plan import Plan
    from ._precast import PrecastReport, full_precision_state_dict, precast_, restore_
    from ._precision import set_precision
    from ._registry import (
        Registration,
        get_backend,
        register_backend,
        registered_backends,
        unregister_backend,
    )
    from ._scaler import GradScaler
    from ._tune import tune

# Imported at its first use, so that ``import amphal`` stays cheap in programs that may not use it.
# The region is not among these: Dynamo must find it when it traces.
_AT_FIRST_USE = {
    "AutocastOp": "_install",
    "Availability": "_backend",
    "Backend": "_backend",
    "DtypeSupport": "_backend",
    "GradHealth": "_monitor",
    "GradMonitor": "_monitor",
    "GradScaler": "_scaler",
    "Hardware": "_backend",
    "KnownHardware": "_hardware",
    "Measurement": "_measured",
    "OpLists": "_oplists",
    "Plan": "_plan",
    "PrecastReport": "_precast",
    "Registration": "_registry",
    "ScalerSupport": "_backend",
    "StepOutcome": "_outcome",
    "custom_bwd": "_custom_function",
    "custom_fwd": "_custom_function",
    "detect": "_detect",
    "full_precision_state_dict": "_precast",
    "get_backend": "_registry",
    "known_hardware": "_hardware",
    "op_lists": "_ops",
    "precast_": "_precast",
    "register_autocast_op": "_install",
    "register_backend": "_registry",
    "registered_backends": "_registry",
    "restore_": "_precast",
    "set_precision": "_precision",
    "tune": "_tune",
    "unregister_backend": "_registry",
}


def __getattr__(name: str) -> Any:
    module = _AT_FIRST_USE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_AT_FIRST_USE})


__version__ = "0.1.0"

__all__ = [
    "AmphalError",
    "AmphalWarning",
    "ArgumentError",
    "ArgumentTypeError",
    "AutocastOp",
    "Availability",
    "Backend",
    "BackendError",
    "BannedOpError",
    "DeviceNotAvailableError",
    "DtypeSupport",
    "DuplicateBackendError",
    "GradHealth",
    "GradMonitor",
    "GradScaler",
    "Hardware",
    "KnownHardware",
    "Measurement",
    "MissingCallError",
    "MissingExtraError",
    "MissingStateKeyError",
    "NonFiniteGradientError",
    "OpLists",
    "OpPolicyError",
    "OwnerWarning",
    "Plan",
    "PrecastError",
    "PrecastReport",
    "PrecisionWarning",
    "RegionStateError",
    "Registration",
    "ScaleCollapseError",
    "ScalerArgumentError",
    "ScalerStateError",
    "ScalerSupport",
    "StateDictError",
    "StepOutcome",
    "TorchTooOldError",
    "TuneError",
    "UnknownDeviceError",
    "UnsupportedPrecisionError",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "detect",
    "full_precision_state_dict",
    "get_backend",
    "known_hardware",
    "op_lists",
    "precast_",
    "register_autocast_op",
    "register_backend",
    "registered_backends",
    "restore_",
    "set_precision",
    "tune",
    "unregister_backend",
]
