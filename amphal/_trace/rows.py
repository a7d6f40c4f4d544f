"""What a trace keeps: one row for all calls that are alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..contract import short_name

__all__ = ["Row", "Rows", "Values"]

MOST_ROWS = 20_000
"""Rows that are kept. Calls beyond them are counted in one last row, so memory is bounded."""


@dataclass
class Values:
    """The range of the values that an op gave, over all its calls."""

    largest: float = 0.0
    """The largest finite magnitude."""
    elements: int = 0
    zeros: int = 0
    at_limit: int = 0
    """Elements whose magnitude is the largest that the dtype has."""
    infinite: int = 0
    nan: int = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Take in one output. Reads it once; waits for the device."""
        if tensor.numel() == 0 or tensor.device.type == "meta" or tensor.is_sparse:
            return
        value = tensor.detach()
        magnitude = value.abs()
        finite = magnitude.isfinite()
        nan = value.isnan()
        kept = torch.where(finite, magnitude, torch.zeros_like(magnitude))
        limit = torch.finfo(value.dtype).max
        counts = torch.stack(
            [(value == 0).sum(), (kept == limit).sum(), nan.sum(), (~finite).sum()]
        ).tolist()
        self.largest = max(self.largest, float(kept.max()))
        self.elements += value.numel()
        self.zeros += counts[0]
        self.at_limit += counts[1]
        self.nan += counts[2]
        self.infinite += counts[3] - counts[2]

    def to_dict(self) -> dict[str, Any]:
        """Shares are of all elements."""
        all_of = max(self.elements, 1)
        return {
            "largest": self.largest,
            "zeros": self.zeros / all_of,
            "at_limit": self.at_limit / all_of,
            "infinite": self.infinite,
            "nan": self.nan,
        }


@dataclass
class Row:
    """Calls of one op at one place with the same dtypes."""

    phase: str
    """``"forward"`` or ``"backward"``."""
    op: str
    """A listed op by its name in :func:`amphal.op_lists`, else the aten op that ran."""
    policy: str
    """The casting policy that was in force; empty for an op that autocast does not list."""
    module: str
    """The path of the innermost module, from the class of the outermost."""
    line: str
    """``file:line`` in the user's code."""
    inputs: tuple[str, ...]
    """The floating-point dtypes of the inputs, before autocast's casts."""
    outputs: tuple[str, ...]
    count: int = 0
    casts: int = 0
    cast_bytes: int = 0
    """Bytes written by the casts of these calls."""
    elsewhere: str = ""
    """The policy of this op on the device that the trace compares with, where it differs."""
    flushed: int = 0
    """Elements that were not zero and became zero in a cast."""
    cast_elements: int = 0
    values: Values | None = None

    @property
    def raised(self) -> bool:
        """Whether low-precision inputs were raised to fp32."""
        return (
            bool(self.casts) and "fp32" in self.outputs and bool({"bf16", "fp16"} & {*self.inputs})
        )

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data."""
        data: dict[str, Any] = {
            "phase": self.phase,
            "op": self.op,
            "policy": self.policy,
            "module": self.module,
            "line": self.line,
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "count": self.count,
            "casts": self.casts,
            "cast_bytes": self.cast_bytes,
            "raised_to_fp32": self.raised,
            "elsewhere": self.elsewhere,
        }
        if self.values is not None:
            data["values"] = self.values.to_dict()
            data["values"]["flushed_to_zero"] = self.flushed / max(self.cast_elements, 1)
        return data


@dataclass
class Rows:
    """All rows of a trace, and the casts of each weight."""

    rows: dict[tuple[Any, ...], Row] = field(default_factory=dict)
    casts: int = 0
    cast_bytes: int = 0
    weights: dict[tuple[str, str], int] = field(default_factory=dict)
    """How often each weight was cast to each dtype."""
    truncated: bool = False
    _last: dict[tuple[Any, ...], tuple[int, int]] = field(default_factory=dict)

    def of(self, call: Any, outputs: tuple[str, ...]) -> Row:
        """The row of a call."""
        key = (call.phase, call.op, call.policy, call.module, call.line, call.inputs, outputs)
        row = self.rows.get(key)
        if row is None:
            if len(self.rows) >= MOST_ROWS:
                self.truncated = True
                key = ("", "all other ops", "", "", "", (), ())
                row = self.rows.get(key)
            if row is None:
                row = self.rows[key] = Row(*key)
        flushed = self._last.pop(key[:6], None)
        if flushed is not None:
            row.flushed += flushed[0]
            row.cast_elements += flushed[1]
        return row

    def count_cast(self, size: int, weight: str | None, dtype: torch.dtype) -> None:
        """A cast that writes ``size`` bytes; of a weight, if it has a name."""
        self.casts += 1
        self.cast_bytes += size
        if weight is not None:
            key = (weight, short_name(dtype))
            self.weights[key] = self.weights.get(key, 0) + 1

    def flushed(self, call: Any, zeros: int, elements: int) -> None:
        """Values that a cast flushed to zero, kept until the row of the call is known."""
        key = (call.phase, call.op, call.policy, call.module, call.line, call.inputs)
        before = self._last.get(key, (0, 0))
        self._last[key] = (before[0] + zeros, before[1] + elements)
