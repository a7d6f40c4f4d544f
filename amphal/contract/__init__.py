"""For those who write a backend: what it declares, and how it is registered."""

# For amphal's own rooms: no part of the contract.
from . import guard as guard
from . import op_names as op_names
from . import registry as registry
from . import spelling as spelling
from .guard import answering as answering
from .guard import declared_lists as declared_lists
from .guard import failing_as as failing_as
from .guard import reason_of as reason_of
from .guard import shown as shown
from .known_hardware import KnownHardware as KnownHardware
from .known_hardware import known_hardware as known_hardware
from .op_lists import OpLists
from .op_lists import expand_lists as expand_lists
from .op_names import base_name as base_name
from .op_names import is_defined as is_defined
from .op_names import overloads as overloads
from .op_names import qualified as qualified
from .op_names import refusal as refusal
from .records import LOW_PRECISION as LOW_PRECISION
from .records import Availability, Backend, DtypeSupport, Hardware, ScalerSupport, torch_version
from .registry import (
    Registration,
    get_backend,
    register_backend,
    registered_backends,
    unregister_backend,
)
from .spelling import DeviceLike as DeviceLike
from .spelling import PrecisionLike as PrecisionLike
from .spelling import named_device as named_device
from .spelling import named_precision as named_precision
from .spelling import short_name as short_name

__all__ = [
    "Availability",
    "Backend",
    "DtypeSupport",
    "Hardware",
    "OpLists",
    "Registration",
    "ScalerSupport",
    "get_backend",
    "register_backend",
    "registered_backends",
    "torch_version",
    "unregister_backend",
]
