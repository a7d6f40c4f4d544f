"""The errors and warnings of amphal.

::

    AmphalError                       everything that this package raises on purpose
     ├─ ArgumentError                 (ValueError)    a value that is not allowed
     │   ├─ UnknownDeviceError                        no backend is registered for this device type
     │   ├─ UnsupportedPrecisionError                 this hardware cannot do this precision
     │   ├─ OpPolicyError             (RuntimeError)  an unknown op or policy, or a banned op
     │   └─ StateDictError                            a state that cannot be loaded
     ├─ ArgumentTypeError             (TypeError)     a value of the wrong type
     ├─ AutocastStateError            (RuntimeError)  a region left where it was not entered
     ├─ BackendError                  (RuntimeError)  a backend that cannot be used, and why
     │   └─ DuplicateBackendError                     two backends claim one device type
     ├─ DeviceNotAvailableError       (RuntimeError)  the backend exists, the device does not
     ├─ MissingExtraError             (ImportError)   a framework that is not installed
     ├─ NonFiniteGradientError        (RuntimeError)  a gradient norm that cannot be clipped to
     ├─ PrecastError                  (RuntimeError)  a precast model used in an unsupported way
     ├─ ScaleCollapseError            (ArithmeticError) the loss scale can fall no further
     ├─ ScalerStateError (RuntimeError, AssertionError) a scaler's methods called out of order
     ├─ TorchTooOldError              (RuntimeError)  this torch lacks something that was asked for
     └─ TuneError                     (RuntimeError)  no candidate could be chosen

    AmphalWarning                     (UserWarning)
     ├─ EngineWarning                                 a region does nothing: an engine casts itself
     └─ PrecisionWarning                              the precision named is emulated or slow

Every message says what was given, what is allowed and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AmphalError",
    "AmphalWarning",
    "ArgumentError",
    "ArgumentTypeError",
    "AutocastStateError",
    "BackendError",
    "DeviceNotAvailableError",
    "DuplicateBackendError",
    "EngineWarning",
    "MissingExtraError",
    "NonFiniteGradientError",
    "OpPolicyError",
    "PrecastError",
    "PrecisionWarning",
    "ScaleCollapseError",
    "ScalerStateError",
    "StateDictError",
    "TorchTooOldError",
    "TuneError",
    "UnknownDeviceError",
    "UnsupportedPrecisionError",
]


class AmphalError(Exception):
    """Everything that amphal raises on purpose."""


class ArgumentError(AmphalError, ValueError):
    """A value that is not allowed."""


class ArgumentTypeError(AmphalError, TypeError):
    """A value of the wrong type."""


class UnknownDeviceError(ArgumentError):
    """No backend is registered for this device type."""


class UnsupportedPrecisionError(ArgumentError):
    """This hardware cannot do this precision at all; the message says what it can."""


class OpPolicyError(ArgumentError, RuntimeError):
    """An op or a policy that does not exist, or an op that autocast bans (torch: RuntimeError)."""


class StateDictError(ArgumentError):
    """A state that cannot be loaded; nothing was changed."""


class DeviceNotAvailableError(AmphalError, RuntimeError):
    """The backend is registered, but its device is not there; the message says why."""


class MissingExtraError(AmphalError, ImportError):
    """A framework that an integration needs is not installed; the message names the extra."""


class BackendError(AmphalError, RuntimeError):
    """A backend that cannot be used; the message says which and why."""


class DuplicateBackendError(BackendError):
    """Two backends claim one device type; the message names both."""


class AutocastStateError(AmphalError, RuntimeError):
    """An autocast region was left where it had not been entered."""


class PrecastError(AmphalError, RuntimeError):
    """A model of :func:`amphal.precast_` was run or changed where its outputs would be others."""


class TorchTooOldError(AmphalError, RuntimeError):
    """The torch that runs lacks something that was asked for."""


class TuneError(AmphalError, RuntimeError):
    """No candidate of ``tune()`` could be chosen; the message gives the reason of each."""


class ScalerStateError(AmphalError, RuntimeError, AssertionError):
    """A scaler's methods were called out of order; the message says which call is missing.

    torch's own scaler raises RuntimeError for some orders and AssertionError for others.
    """


class NonFiniteGradientError(AmphalError, RuntimeError):
    """The gradient norm is not finite and ``error_if_nonfinite`` was asked for."""


class ScaleCollapseError(AmphalError, ArithmeticError):
    """The loss scale can fall no further and the gradients still overflow."""


class AmphalWarning(UserWarning):
    """The base of amphal's warnings."""


class EngineWarning(AmphalWarning):
    """A region stepped aside, because the engine around it owns mixed precision."""


class PrecisionWarning(AmphalWarning):
    """The precision that was named works here, but is emulated or slower than fp32."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """A sentence offering the names nearest to ``given``, or an empty string."""
    near = difflib.get_close_matches(given, sorted(allowed), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
