"""For those who write a backend: what it declares, and how it is registered."""

from .op_lists import OpLists
from .records import Availability, Backend, DtypeSupport, Hardware, ScalerSupport, torch_version
from .registry import (
    Registration,
    get_backend,
    register_backend,
    registered_backends,
    unregister_backend,
)

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
