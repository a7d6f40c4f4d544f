"""amphal: one mixed-precision front end for every PyTorch device.

A training script says :func:`detect`, :class:`autocast` and :class:`GradScaler` and never names a
device; what a device can do is declared by its backend, in one file.
"""

from __future__ import annotations

from ._autocast import autocast
from ._backend import Availability, Backend, DtypeSupport, Hardware, ScalerSupport
from ._custom_function import custom_bwd, custom_fwd
from ._detect import Plan, detect
from ._hardware import KnownHardware, known_hardware
from ._install import AutocastOp, register_autocast_op
from ._monitor import GradHealth, GradMonitor
from ._oplists import OpLists
from ._ops import op_lists
from ._outcome import StepOutcome
from ._precision import set_precision
from ._registry import (
    Registration,
    get_backend,
    register_backend,
    registered_backends,
    unregister_backend,
)
from ._scaler import GradScaler
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
    PrecisionWarning,
    RegionStateError,
    ScaleCollapseError,
    ScalerArgumentError,
    ScalerStateError,
    StateDictError,
    TorchTooOldError,
    UnknownDeviceError,
    UnsupportedPrecisionError,
)

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
    "MissingCallError",
    "MissingExtraError",
    "MissingStateKeyError",
    "NonFiniteGradientError",
    "OpLists",
    "OpPolicyError",
    "OwnerWarning",
    "Plan",
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
    "UnknownDeviceError",
    "UnsupportedPrecisionError",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "detect",
    "get_backend",
    "known_hardware",
    "op_lists",
    "register_autocast_op",
    "register_backend",
    "registered_backends",
    "set_precision",
    "unregister_backend",
]
