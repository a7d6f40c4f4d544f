"""``amphal.trace()``: a record of what ran in which precision."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .._casting import op_lists
from .._choice import choose
from ..contract import OpLists
from ..errors import ArgumentTypeError
from .page import page
from .recorder import Recorder
from .rows import Row, Rows

__all__ = ["Trace", "trace"]

_LIMITS = (
    "Recorded is the thread that entered the trace, and the backward passes that it starts. "
    "A function that torch.compile has compiled runs as usual: what is inside its graph is not "
    "seen. Recording costs several times the step."
)


class Trace:
    """What :func:`trace` recorded. Complete when the block has ended."""

    def __init__(self, compare: str | None = None, lists: OpLists | None = None) -> None:
        self._rows = Rows()
        self.compare = compare
        """The device type whose policies are compared, or None."""
        self._lists = lists

    @property
    def rows(self) -> list[Row]:
        """One row for all calls of an op at one place with the same dtypes, by first use."""
        rows = list(self._rows.rows.values())
        if self._lists is not None:
            there = dict(self._lists)
            for row in rows:
                if row.policy:
                    wanted = there.get(row.op, "pass_by")
                    row.elsewhere = wanted if wanted != row.policy else ""
        return rows

    @property
    def casts(self) -> int:
        """How many casts between floating-point dtypes ran."""
        return self._rows.casts

    @property
    def cast_bytes(self) -> int:
        """Bytes that the casts wrote."""
        return self._rows.cast_bytes

    @property
    def cast_again(self) -> dict[str, int]:
        """The weights that were cast to one dtype more than once, and how often."""
        return {f"{w} to {d}": n for (w, d), n in self._rows.weights.items() if n > 1}

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data that JSON takes."""
        return {
            "compare": self.compare,
            "casts": self.casts,
            "cast_bytes": self.cast_bytes,
            "cast_again": self.cast_again,
            "truncated": self._rows.truncated,
            "limits": _LIMITS,
            "rows": [row.to_dict() for row in self.rows],
        }

    def table(self, limit: int = 40, width: int = 110) -> str:
        """A table to read: the rows with the most bytes cast first.

        Args:
            limit: how many rows.
            width: columns of the terminal.
        """
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("op", "in", "out", "policy", "calls", "casts", "kB cast", "module", "line"):
            table.add_column(name, overflow="fold", justify="right" if "c" in name[:1] else "left")
        rows = sorted(self.rows, key=lambda row: -row.cast_bytes)
        for row in rows[:limit]:
            policy = row.policy + (f" ({self.compare}: {row.elsewhere})" if row.elsewhere else "")
            table.add_row(
                row.op + (" (backward)" if row.phase == "backward" else ""),
                ",".join(dict.fromkeys(row.inputs)),
                ",".join(dict.fromkeys(row.outputs)),
                policy,
                str(row.count),
                str(row.casts),
                f"{row.cast_bytes / 1e3:.1f}",
                row.module,
                ":".join(Path(row.line).parts[-1:]),
            )
        text = io.StringIO()
        console = Console(file=text, width=width, no_color=True)
        console.print(table)
        if len(rows) > limit:
            console.print(f"and {len(rows) - limit} rows more: to_dict(), to_html(path)")
        console.print(f"{self.casts} casts, {self.cast_bytes / 1e6:.2f} MB written by them")
        again = sorted(self.cast_again.items(), key=lambda item: -item[1])
        if again:
            console.print(
                f"{len(again)} weights cast again and again, most often {again[0][0]}: "
                f"{again[0][1]} times"
            )
        return text.getvalue()

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page: the tree of modules by precision, and a sortable table."""
        path = Path(path)
        path.write_text(page(self.to_dict()), encoding="utf-8")
        return path

    def __repr__(self) -> str:
        return f"<amphal trace: {len(self._rows.rows)} rows, {self.casts} casts>"


@contextlib.contextmanager
def trace(*, values: bool = False, compare: Any = None) -> Iterator[Trace]:
    """Record what autocast does in this block: every op, its dtypes and its casts.

    Forward and backward; regions of any library. A call costs nothing to programs that do not
    enter one; inside, a step takes several times as long.

    Args:
        values: also record the range of each output: largest magnitude, shares of zeros, of values
            that a cast flushed to zero and of values at the dtype's limit, infinities and NaN.
        compare: a device type. Ops that its autocast would treat otherwise are marked, banned ops
            among them. The device need not be here.

    Raises:
        ArgumentTypeError: ``values`` is not a bool.
        UnknownDeviceError: no backend is registered for ``compare``.

    Example::

        with amphal.trace(compare="cuda") as trace:
            with amphal.autocast():
                loss = model(x).mean()
            loss.backward()
        print(trace.table())
    """
    if not isinstance(values, bool):
        raise ArgumentTypeError(f"values must be True or False, got {values!r}")
    lists = None
    devices = (choose.detect().device.type,)
    if compare is not None:
        lists = op_lists(compare, torch.get_autocast_dtype(devices[0]))
        compare = str(compare)
    result = Trace(compare, lists)
    recorder = Recorder(result._rows, values)
    with recorder.recording(frozenset(dict(lists or OpLists())), devices):
        yield result
