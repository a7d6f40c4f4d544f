"""Importing a framework, or saying which extra brings it; and what all integrations are given."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from .._front import Plan
from ..errors import ArgumentTypeError, MissingExtraError

__all__ = ["framework", "require_plan", "require_scaler"]


def framework(name: str, extra: str) -> ModuleType:
    """The module ``name`` of a framework that ``pip install 'amphal[extra]'`` brings."""
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        top = name.partition(".")[0]
        if isinstance(exc, ModuleNotFoundError) and (exc.name or "").partition(".")[0] == top:
            why = f"{top} is not installed"
        else:
            why = f"{top} cannot be imported ({type(exc).__name__}: {exc})"
        raise MissingExtraError(
            f"amphal.integrations.{extra} needs {top}, but {why}; "
            f"install it with: pip install 'amphal[{extra}]'"
        ) from exc


def require_plan(plan: object, function: str) -> Plan:
    """``plan``, if it is one."""
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(
            f"{function}() takes an amphal.Plan, got {type(plan).__name__} ({plan!r}); "
            "amphal.detect() gives one"
        )
    return plan


def require_scaler(scaler: Any, function: str) -> Any:
    """``scaler``, if it is one or None."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentTypeError(
            f"{function}() takes scaler=amphal.GradScaler(...) or None, "
            f"got {type(scaler).__name__} ({scaler!r})"
        )
    return scaler
