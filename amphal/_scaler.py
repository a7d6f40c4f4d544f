"""``amphal.GradScaler``: torch's gradient scaler, with the device and the need taken from the plan."""

from __future__ import annotations

from typing import Any

import torch

from . import _detect
from ._detect import Plan

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """A placeholder until the scaler lands."""

    def __init__(self, device: Any = None, *args: Any, enabled: bool | None = None, **kw: Any):
        plan = device if isinstance(device, Plan) else _detect.detect(device)
        on = plan.use_scaler if enabled is None else enabled
        super().__init__(plan.device.type, *args, enabled=on, **kw)
