"""Every use of a private torch or CPython name, in one place, with its reason.

Each was checked on torch 2.6, 2.8, 2.9 and 2.13. Where one is missing, the message says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .errors import TorchTooOldError

__all__ = [
    "autocast_available",
    "constant_in_graphs",
    "function_mode_enabled",
    "plain_autocast",
    "privateuse1_name",
]

_F = TypeVar("_F", bound=Callable[..., Any])


def _private(name: str) -> Any:
    if not hasattr(torch._C, name):
        raise TorchTooOldError(
            f"torch {torch.__version__} has no torch._C.{name}, which amphal needs; "
            "use a torch that this amphal supports (2.6 to 2.13), or a newer amphal"
        )
    return getattr(torch._C, name)


# A function mode may be export's tracing mode, which must see torch's own region being entered.
# There is no public query.
function_mode_enabled: Callable[[], bool] = _private("_is_torch_function_mode_enabled")

# The name that a third-party device took for itself; torch.autocast keeps it as an attribute.
privateuse1_name: Callable[[], str] = _private("_get_privateuse1_backend_name")


def autocast_available(device_type: str) -> bool:
    """Whether torch has an autocast state for this device type.

    ``torch.amp.is_autocast_available`` raises for a name that torch does not know instead of
    answering no.
    """
    try:
        return torch.amp.is_autocast_available(device_type)
    except RuntimeError:
        return False


def constant_in_graphs(func: _F) -> _F:
    """Let Dynamo call ``func`` while it traces and take the result as a constant.

    ``torch.compiler.assume_constant_result`` sets this same attribute, but imports Dynamo to do
    so, which costs a second at import.
    """
    func._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return func


def plain_autocast(
    device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool | None
) -> torch.autocast:
    """torch's own region, already validated: for "cuda" its constructor would ask again."""
    region = torch.autocast(device_type, dtype=dtype, enabled=False, cache_enabled=cache_enabled)
    region._enabled = enabled
    return region
