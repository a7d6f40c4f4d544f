"""Stand-ins for the vendors' drivers, shared by the tests of the backends."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import amphal
from amphal import Hardware

Patch = pytest.MonkeyPatch


def known(name: str, **changes: Any) -> Hardware:
    return dataclasses.replace(amphal.known_hardware()[name].hardware, **changes)


def answers(value: object) -> Callable[..., object]:
    return lambda *args, **kwargs: value


def raises(error: Exception) -> Callable[..., object]:
    def fail(*args: object, **kwargs: object) -> object:
        raise error

    return fail


def cuda_build(patch: Patch, *, cuda: str | None = "12.8", hip: str | None = None) -> None:
    patch.setattr(torch.version, "cuda", cuda)
    patch.setattr(torch.version, "hip", hip)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        patch.delenv(name, raising=False)


def cuda_device(patch: Patch, *, hip: str | None = None, **properties: Any) -> None:
    """Stand in for one CUDA or ROCm device."""
    cuda_build(patch, cuda=None if hip else "12.8", hip=hip)
    patch.setattr(torch.cuda, "is_available", answers(True))
    patch.setattr(torch.cuda, "current_device", answers(0))
    patch.setattr(torch.cuda, "get_device_properties", answers(SimpleNamespace(**properties)))


def xpu_device(patch: Patch, **properties: Any) -> None:
    """Stand in for one XPU device."""
    patch.setattr(torch.version, "xpu", "20250302", raising=False)
    patch.setattr(torch.xpu, "is_available", answers(True))
    patch.setattr(torch.xpu, "current_device", answers(0))
    facts = {"total_memory": 1 << 34, **properties}
    patch.setattr(torch.xpu, "get_device_properties", answers(SimpleNamespace(**facts)))


def mac(patch: Patch, brand: str, version: str) -> None:
    """Stand in for a Mac: its Metal device, its sysctl and its macOS version."""
    patch.setattr(platform, "system", answers("Darwin"))
    patch.setattr(platform, "mac_ver", answers((version, ("", "", ""), "arm64")))
    patch.setattr(torch.backends.mps, "is_built", answers(True))
    patch.setattr(torch.backends.mps, "is_available", answers(True))
    patch.setattr(torch.backends.mps, "get_name", answers(""), raising=False)
    patch.setattr(subprocess, "run", answers(SimpleNamespace(stdout=f"{brand}\n")))
