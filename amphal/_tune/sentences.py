"""What a measurement leaves behind: one frozen row a candidate, and the sentences made of it."""

from __future__ import annotations

from collections.abc import Iterable

from .._choice import Measurement

__all__ = ["NOISY", "Measurement", "duration", "sentences"]

NOISY = 0.3
"""A spread beyond which a choice is doubtful."""


def duration(seconds: float) -> str:
    """Three digits with a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _sentence(row: Measurement) -> str:
    if row.dropped:
        return f"dropped {row.candidate}: {row.note}"
    if row.seconds is None or row.ratio is None:
        return f"did not time {row.candidate}: {row.note}"
    loss = "" if row.loss is None else f", loss {row.loss:.4g}"
    note = f" ({row.note})" if row.note else ""
    return (
        f"measured {row.candidate}: {duration(row.seconds)} a step, {row.ratio:.2f} x the fastest, "
        f"in {row.rounds} rounds{loss}{note}"
    )


_LOW = ("bf16", "fp16")


def sentences(rows: Iterable[Measurement], chosen: str) -> list[str]:
    """One sentence a row, and a doubt where the chosen one's times say that they are none."""
    rows = list(rows)
    told = [_sentence(row) for row in rows]
    spread = next((row.spread for row in rows if row.candidate == chosen), None)
    if spread is not None and spread > NOISY:
        told.append(
            f"the times of {chosen} scatter by {spread:.0%}, so other work disturbed them: a quiet "
            "machine, fewer threads or a longer budget_s tells better"
        )
    full = {row.loss for row in rows if row.candidate in ("fp32", "tf32")} - {None}
    same = [row.candidate for row in rows if row.candidate in _LOW and row.loss in full]
    if same:
        told.append(
            f"the loss of {' and '.join(same)} is that of full precision to the last bit: does the "
            "step compute inside plan.autocast()?"
        )
    return told
