"""The plan, and the choice: pure functions of what a backend declares of a piece of hardware."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from .._torch import PRECISIONS
from .._torch import matmul as fp32_matmul
from ..contract import (
    LOW_PRECISION,
    Backend,
    DtypeSupport,
    Hardware,
    ScalerSupport,
    answering,
    failing_as,
    short_name,
    shown,
)
from ..errors import ArgumentError, ArgumentTypeError, BackendError, UnsupportedPrecisionError

if TYPE_CHECKING:
    from .measurement import Measurement

__all__ = ["Choice", "choose", "decide", "facts", "has_scaler"]

_DTYPES = (*LOW_PRECISION, torch.float32)
_FULL = DtypeSupport("native", False, "full precision")
_MISSING = DtypeSupport("absent", False, "the backend declares no support for it")


@dataclass(frozen=True, eq=True)
class Choice:
    """What mixed precision should be on one device, and why. Immutable, hashable, picklable."""

    device: torch.device
    """Where to run: with the index that was named, without one if none was."""
    dtype: torch.dtype
    """bfloat16, float16, or float32 where low precision doesn't pay."""
    use_scaler: bool
    """True where gradients of this dtype need loss scaling (float16)."""
    fused_optimizers: bool
    """True where torch's fused optimizers run on this device."""
    hardware: Hardware
    """The facts that the choice was made from."""
    support: Mapping[torch.dtype, DtypeSupport] = field(hash=False)
    """What every dtype is worth on this hardware; read-only."""
    reasons: tuple[str, ...] = field(hash=False)
    """Why: the device, the dtype, the scaler, one phrase each."""
    matmul_precision: str | None = None
    """For ``torch.set_float32_matmul_precision``; None: left alone. :meth:`matmul` applies it."""
    measured: tuple[Measurement, ...] | None = field(default=None, hash=False)
    """What :func:`amphal.tune` measured, a row a candidate; None where nothing was measured."""

    def __post_init__(self) -> None:
        if not isinstance(self.device, torch.device):
            raise ArgumentTypeError(f"Plan: device must be a torch.device, got {self.device!r}")
        if self.dtype not in _DTYPES:
            raise UnsupportedPrecisionError(
                f"Plan: dtype must be bfloat16, float16 or float32, got {self.dtype!r}"
            )
        if self.matmul_precision not in (None, *PRECISIONS):
            raise ArgumentError(
                f"Plan: matmul_precision must be one of {', '.join(PRECISIONS)} or None, "
                f"got {self.matmul_precision!r}"
            )
        support = {dtype: self.support.get(dtype, _MISSING) for dtype in LOW_PRECISION}
        support[torch.float32] = self.support.get(torch.float32, _FULL)
        object.__setattr__(self, "support", MappingProxyType(support))

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            type(self),
            (
                self.device,
                self.dtype,
                self.use_scaler,
                self.fused_optimizers,
                self.hardware,
                dict(self.support),
                self.reasons,
                self.matmul_precision,
                self.measured,
            ),
        )

    def matmul(self) -> AbstractContextManager[None]:
        """A block in which float32 matmuls have this plan's precision; put it around whole steps.

        The setting is torch's own, of the whole process, and put back at the end. A plan without
        one (every plan of :func:`detect`) changes nothing.
        """
        return fp32_matmul.matmul_precision(self.matmul_precision)

    def explain(self) -> str:
        """The plan and its reasons as a paragraph that a person reads."""
        scaler = "with" if self.use_scaler else "without"
        matmul = self.matmul_precision
        head = (
            f"{self.hardware.name} ({self.device}): {short_name(self.dtype)} {scaler} a gradient "
            f"scaler, {'fused' if self.fused_optimizers else 'unfused'} optimizers"
            f"{f', float32 matmuls at {matmul!r} (plan.matmul())' if matmul else ''}."
        )
        return " ".join([head, *(f"{reason[0].upper()}{reason[1:]}." for reason in self.reasons)])

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON-able values."""
        return {
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "use_scaler": self.use_scaler,
            "fused_optimizers": self.fused_optimizers,
            "hardware": self.hardware.to_dict(),
            "support": {
                short_name(dtype): {
                    "level": s.level,
                    "accelerated": s.accelerated,
                    "why": s.why,
                }
                for dtype, s in self.support.items()
            },
            "reasons": list(self.reasons),
            "matmul_precision": self.matmul_precision,
            "measured": None if self.measured is None else [row.to_dict() for row in self.measured],
        }


def facts(
    backend: Backend, hardware: Hardware
) -> tuple[dict[torch.dtype, DtypeSupport], ScalerSupport]:
    told = f"the backend {backend.device_type!r} failed on {hardware.name!r}:"
    with failing_as(BackendError, told):
        with answering(backend, "dtypes"):
            support = dict(backend.dtypes(hardware))
        with answering(backend, "scaler"):
            scaler = backend.scaler(hardware)
    wrong = [k for k, v in support.items() if not isinstance(v, DtypeSupport) or k not in _DTYPES]
    if wrong or not isinstance(scaler, ScalerSupport):
        raise BackendError(
            f"the backend {backend.device_type!r} must map bfloat16 and float16 to a DtypeSupport "
            "and answer scaler() with a ScalerSupport, both of amphal.contract, "
            f"got {shown(support)} and {shown(scaler)}"
        )
    for dtype in LOW_PRECISION:
        support.setdefault(dtype, _MISSING)
    if support.setdefault(torch.float32, _FULL).level == "absent":
        raise BackendError(
            f"the backend {backend.device_type!r} says that {hardware.name!r} has no float32; it "
            "is what is left where nothing else pays, and every device must have it"
        )
    return support, scaler


def has_scaler(backend: Backend, scaler: ScalerSupport) -> bool:
    return scaler.detects_overflow or backend.vendor_scaler is not None


def choose(
    support: Mapping[torch.dtype, DtypeSupport], can_scale: bool
) -> tuple[torch.dtype, list[str]]:
    """Native and accelerated bf16, else accelerated fp16 with a scaler, else float32."""
    bf16, fp16 = support[torch.bfloat16], support[torch.float16]
    if bf16.level == "native" and bf16.accelerated:
        return torch.bfloat16, [f"chose bf16, native and faster than fp32 here: {bf16.why}"]
    no_bf16 = f"no bf16 by default ({_worth(bf16)}): {bf16.why}"
    if fp16.level != "absent" and fp16.accelerated:
        if can_scale:
            return torch.float16, [f"chose fp16, faster than fp32 here: {fp16.why}", no_bf16]
        no_fp16 = "no fp16: this hardware saturates instead of overflowing, so nothing can see it"
        return torch.float32, ["low precision doesn't pay here", no_bf16, no_fp16]
    no_fp16 = f"no fp16 by default ({_worth(fp16)}): {fp16.why}"
    return torch.float32, ["low precision doesn't pay here", no_bf16, no_fp16]


def _worth(s: DtypeSupport) -> str:
    if s.level == "absent":
        return "absent"
    return f"{s.level}, {'faster' if s.accelerated else 'not faster'} than fp32"


def decide(
    backend: Backend,
    hardware: Hardware,
    device: torch.device,
    precision: torch.dtype | None,
    by: str,
    reasons: list[str],
) -> tuple[Choice, str]:
    """The plan, and a warning about it or an empty string. Pure."""
    support, scaler = facts(backend, hardware)
    can_scale = has_scaler(backend, scaler)
    warning = ""
    if precision is None:
        dtype, why = choose(support, can_scale)
    else:
        dtype, s = precision, support[precision]
        if s.level == "absent":
            can = [short_name(d) for d, v in support.items() if v.level != "absent"]
            raise UnsupportedPrecisionError(
                f"{by} asks for {short_name(dtype)}, which {hardware.name} ({device}) cannot do: "
                f"{s.why}. It can do: {', '.join(can)}"
            )
        why = [f"asked for {short_name(dtype)} ({by}): {s.why}"]
        if dtype in LOW_PRECISION and (s.level == "emulated" or not s.accelerated):
            warning = (
                f"{by} asks for {short_name(dtype)} on {hardware.name} ({device}), where it is "
                f"{_worth(s)}: {s.why}. amphal.detect() would choose "
                f"{short_name(choose(support, can_scale)[0])}"
            )
    use_scaler = dtype is torch.float16 and can_scale
    if use_scaler:
        why.append("the scaler is on, because fp16 gradients underflow without loss scaling")
    elif dtype is torch.float16:
        note = "no scaler: this hardware saturates instead of overflowing, so it could not work"
        why.append(note)
        warning = f"{warning}. {note}" if warning else f"{hardware.name}: {note}"
    plan = Choice(
        device, dtype, use_scaler, scaler.fused_optimizers, hardware, support, (*reasons, *why)
    )
    return plan, warning
