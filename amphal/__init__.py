"""amphal: one mixed-precision front end for every PyTorch device.

A training script says :func:`detect`, :class:`autocast` and :class:`GradScaler` and never names a
device; what a device can do is declared by its backend, in one file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._autocast.autocast import autocast
from ._version import __version__ as __version__
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
    from ._autocast.custom_function import custom_bwd, custom_fwd
    from ._autocast.pin import set_precision
    from ._casting.live_lists import op_lists
    from ._casting.rules import AutocastOp, register_autocast_op
    from ._choice.measurement import Measurement
    from ._front import Plan, detect
    from ._precast.precast import PrecastReport, full_precision_state_dict, precast_, restore_
    from ._scaler.monitor import GradHealth, GradMonitor
    from ._scaler.outcome import StepOutcome
    from ._scaler.scaler import GradScaler
    from ._tune.tune import tune
    from .contract.known_hardware import KnownHardware, known_hardware
    from .contract.op_lists import OpLists
    from .contract.records import Availability, Backend, DtypeSupport, Hardware, ScalerSupport
    from .contract.registry import (
        Registration,
        get_backend,
        register_backend,
        registered_backends,
        unregister_backend,
    )

# Imported at its first use, so that ``import amphal`` stays cheap in programs that may not use it.
# The region is not among these: Dynamo must find it when it traces.
_AT_FIRST_USE = {
    "AutocastOp": "_casting.rules",
    "Availability": "contract.records",
    "Backend": "contract.records",
    "DtypeSupport": "contract.records",
    "GradHealth": "_scaler.monitor",
    "GradMonitor": "_scaler.monitor",
    "GradScaler": "_scaler.scaler",
    "Hardware": "contract.records",
    "KnownHardware": "contract.known_hardware",
    "Measurement": "_choice.measurement",
    "OpLists": "contract.op_lists",
    "Plan": "_front",
    "PrecastReport": "_precast.precast",
    "Registration": "contract.registry",
    "ScalerSupport": "contract.records",
    "StepOutcome": "_scaler.outcome",
    "custom_bwd": "_autocast.custom_function",
    "custom_fwd": "_autocast.custom_function",
    "detect": "_front",
    "full_precision_state_dict": "_precast.precast",
    "get_backend": "contract.registry",
    "known_hardware": "contract.known_hardware",
    "op_lists": "_casting.live_lists",
    "precast_": "_precast.precast",
    "register_autocast_op": "_casting.rules",
    "register_backend": "contract.registry",
    "registered_backends": "contract.registry",
    "restore_": "_precast.precast",
    "set_precision": "_autocast.pin",
    "tune": "_tune.tune",
    "unregister_backend": "contract.registry",
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
