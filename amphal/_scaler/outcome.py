"""What the steps of a scaler came to: kept where it was computed, read when somebody asks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._torch import private

__all__ = ["AT_FLOOR", "STEPPED", "UNREAD_LIMIT", "History", "StepOutcome"]

UNREAD_LIMIT = 64
"""How many iterations may pass before the host reads what came of them."""

AT_FLOOR = -1.0
"""A record of an iteration: 0 stepped, positive overflowed, negative overflowed at the floor."""


class StepOutcome:
    """What one ``step`` did. Asking may wait for the device once; the answer is then kept.

    True as a bool if the optimizer stepped.
    """

    __slots__ = ("_found", "nothing_to_do")

    def __init__(self, found: bool | Tensor, nothing_to_do: bool = False) -> None:
        self._found = found
        self.nothing_to_do = nothing_to_do
        """No parameter had a gradient, so the optimizer was not called. Never waits."""

    @property
    def skipped(self) -> bool:
        """A gradient was inf or NaN, so no parameter was changed."""
        if not isinstance(self._found, bool):
            self._found = bool(self._found.item())
        return self._found and not self.nothing_to_do

    @property
    def stepped(self) -> bool:
        """The optimizer changed its parameters."""
        return not (self.nothing_to_do or self.skipped)

    def __bool__(self) -> bool:
        return self.stepped

    def __str__(self) -> str:
        if self.nothing_to_do:
            return "nothing to do"
        return "skipped" if self.skipped else "stepped"

    def __repr__(self) -> str:
        known = self.nothing_to_do or isinstance(self._found, bool)
        return f"<StepOutcome: {self if known else 'not read yet'}>"


STEPPED = StepOutcome(False)
"""What each step of a disabled scaler did."""


class History:
    """The iterations so far: counters on the host, and records that the device still holds.

    A record is appended by each update; one that is still a tensor costs nothing until
    :meth:`read`, which fetches all of them in a single transfer.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.skipped = 0
        self.consecutive = 0
        self.collapse: str | None = None
        self._unread: list[float | Tensor] = []
        self._untold: list[int] = []

    def reset(self, steps: int, skipped: int, consecutive: int) -> None:
        """Start from these counts."""
        self.steps, self.skipped, self.consecutive = steps, skipped, consecutive
        self.collapse = None
        self._unread = []

    def __len__(self) -> int:
        return len(self._unread)

    def append(self, record: float | Tensor) -> None:
        """Record an iteration: a number, or a scalar tensor that is to be read later."""
        self._unread.append(record)

    def stepped(self) -> None:
        """Count an iteration that stepped, where nothing is left to be read."""
        self.steps += 1
        self.consecutive = 0

    @property
    def known(self) -> bool:
        """Whether reading needs no transfer from the device."""
        return all(isinstance(record, float) for record in self._unread)

    def read(self, limit: int | None, extra: Tensor | None) -> float | None:
        """Count every record; one transfer at most, none if all records are numbers.

        Args:
            limit: the most overflows in a row, or None to stop at the first one at the floor.
            extra: a scalar tensor to fetch in the same transfer (the scale).

        Returns:
            The value of ``extra`` if there was a transfer.
        """
        records, self._unread = self._unread, []
        tensors = [r for r in records if isinstance(r, Tensor)]
        value = None
        if tensors:
            if extra is not None:
                tensors.append(extra)
            fetched = torch.stack(tensors).tolist()
            value = fetched[-1] if extra is not None else None
            numbers = iter(fetched)
            records = [next(numbers) if isinstance(r, Tensor) else r for r in records]
        for record in records:
            if record:
                self._untold.append(self.steps + self.skipped)
                self.skipped += 1
                self.consecutive += 1
                self._judge(record, limit)
            else:
                self.steps += 1
                self.consecutive = 0
        return value

    def tell(self, on_skip: Callable[[int], object] | None) -> None:
        """Call ``on_skip`` with the number of each skipped iteration read since; it may raise."""
        while self._untold:
            iteration = self._untold.pop(0)
            if on_skip is not None:
                on_skip(iteration)

    def _judge(self, record: object, limit: int | None) -> None:
        if limit is None:
            if isinstance(record, float) and record < 0:
                self.collapse = "the scale is at its floor and the gradients still overflow"
        elif self.consecutive > limit:
            self.collapse = (
                f"{self.consecutive} steps in a row overflowed, {limit} are allowed "
                "(max_consecutive_skips)"
            )


private.not_as_frames(__name__)
