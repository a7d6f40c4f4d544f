"""``detect(process_group=...)``: ranks of different hardware agree on one precision.

Each rank answers for its own device as if it were alone; one all-gather then tells every rank what
the others' hardware can do, and all of them apply the same rule to the same facts. A rank that
cannot answer says so in the same collective, so nobody is left waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ..contract import DtypeSupport
from ..errors import AmphalError, ArgumentError, ArgumentTypeError, BackendError

if TYPE_CHECKING:
    from .choice import Choice

__all__ = ["Ballot", "agree", "detect", "require_group"]

_Choose = Callable[[Mapping[torch.dtype, DtypeSupport], bool], tuple[torch.dtype, list[str]]]

_LEVELS = ("absent", "emulated", "native")


@dataclass(frozen=True)
class Ballot:
    """What one rank tells the others; plain values that pickle."""

    rank: int
    """The rank in the group."""
    name: str = ""
    """The hardware's name."""
    chosen: torch.dtype = torch.float32
    """What this rank would take alone."""
    named: torch.dtype | None = None
    """What the user named on this rank; None for "auto"."""
    support: Mapping[torch.dtype, DtypeSupport] = field(default_factory=dict)
    """What each dtype is worth there."""
    can_scale: bool = True
    """Whether a scaler can see an overflow there."""
    error: AmphalError | None = None
    """Why this rank has no answer."""

    @property
    def who(self) -> str:
        """The rank and its hardware, for messages."""
        return f"rank {self.rank} ({self.name})"


def detect(
    group: Any,
    alone: Callable[[], tuple[Choice, torch.dtype | None]],
    can_scale: Callable[[Choice], bool],
    choose: _Choose,
) -> Choice:
    """This rank's plan, with the precision that all ranks of ``group`` agree on. One collective.

    Args:
        alone: gives the plan of this rank alone, and the precision that its user named.
        can_scale: whether a scaler can see an overflow where that plan runs.
        choose: the rule that a single machine chooses by.
    """
    import torch.distributed as dist

    require_group(group)
    rank, plan = dist.get_rank(group), None
    try:
        plan, named = alone()
        support = dict(plan.support)
        ballot = Ballot(rank, plan.hardware.name, plan.dtype, named, support, can_scale(plan))
    except AmphalError as exc:
        ballot = Ballot(rank, error=exc)
    except Exception as exc:
        ballot = Ballot(rank, error=BackendError(f"{type(exc).__name__}: {exc}"))
    ballots: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ballots, ballot, group=group)
    _refuse_failures(ballots)
    assert plan is not None  # or this rank's own ballot was refused
    return agree(plan, ballots, choose)


def _usable(group: Any) -> bool:
    import torch.distributed as dist

    started = dist.is_available() and dist.is_initialized()
    if not (started and isinstance(group, dist.ProcessGroup)):
        return False
    try:
        return dist.get_rank(group) >= 0
    except ValueError:  # destroyed already
        return False


def require_group(group: Any) -> None:
    """Raise :class:`ArgumentTypeError` unless ``group`` is a process group that can be used."""
    if not _usable(group):
        raise ArgumentTypeError(
            "process_group must be a torch.distributed.ProcessGroup that this process is in, or "
            f"None, got {type(group).__name__} ({group!r}). Call "
            "torch.distributed.init_process_group() first; torch.distributed.group.WORLD is then "
            "the group of all ranks"
        )


def agree(plan: Choice, ballots: Sequence[Ballot], choose: _Choose) -> Choice:
    """``plan`` with the precision that all ballots allow, and the reason for it. Pure."""
    _refuse_different_wishes(ballots)
    held, can_scale = _least(ballots), all(b.can_scale for b in ballots)
    dtype = ballots[0].named or choose(held, can_scale)[0]
    return replace(
        plan,
        dtype=dtype,
        use_scaler=dtype is torch.float16 and can_scale,
        reasons=(*plan.reasons, _why(ballots, dtype, held)),
    )


def _refuse_failures(ballots: Sequence[Ballot]) -> None:
    failed = [b for b in ballots if b.error is not None]
    if failed:
        error = failed[0].error
        others = f"; {_ranks(failed[1:])} failed too" if failed[1:] else ""
        raise type(error)(f"{_ranks(failed[:1])} of the process group: {error}{others}") from error  # type: ignore[misc]


def _refuse_different_wishes(ballots: Sequence[Ballot]) -> None:
    wishes: dict[str, list[Ballot]] = {}
    for ballot in ballots:
        wishes.setdefault(_name(ballot.named) if ballot.named else "auto", []).append(ballot)
    if len(wishes) > 1:
        said = "; ".join(f"{named!r} on {_ranks(those)}" for named, those in wishes.items())
        raise ArgumentError(
            f"the ranks name different precisions: {said}. Pass the same precision= on every rank "
            "and set AMPHAL_PRECISION on all of them or on none"
        )


def _least(ballots: Sequence[Ballot]) -> dict[torch.dtype, DtypeSupport]:
    """For each dtype the least that a rank has of it, and which rank that is."""
    least = {}
    for dtype in ballots[0].support:
        worst = min(ballots, key=lambda b: _worth(b.support[dtype]))
        s = worst.support[dtype]
        least[dtype] = DtypeSupport(s.level, s.accelerated, f"{worst.who}, {s.why}")
    return least


def _worth(s: DtypeSupport) -> tuple[bool, int]:
    # The choice asks first whether a dtype pays; what is absent is never accelerated.
    return s.accelerated and s.level != "emulated", _LEVELS.index(s.level)


def _why(
    ballots: Sequence[Ballot], dtype: torch.dtype, held: Mapping[torch.dtype, DtypeSupport]
) -> str:
    """How the ranks came to ``dtype``, and who held the others back."""
    head = f"the {len(ballots)} ranks agreed on {_name(dtype)}"
    would: dict[torch.dtype, list[Ballot]] = {}
    for ballot in ballots:
        if ballot.chosen is not dtype:
            would.setdefault(ballot.chosen, []).append(ballot)
    if not would:
        return head
    alone = "; ".join(f"{_ranks(those)} would take {_name(d)} alone" for d, those in would.items())
    back = [f"no {_name(d)} for all: {held[d].why}" for d in would if d is not torch.float32]
    blind = [b for b in ballots if not b.can_scale]
    if blind and torch.float16 in would:
        back.append(f"no scaler for all: no overflow can be seen on {_ranks(blind)}")
    return f"{head}: {alone}; {'; '.join(back)}"


def _name(dtype: torch.dtype) -> str:
    from ..contract import short_name

    return short_name(dtype)


def _ranks(ballots: Sequence[Ballot], most: int = 8) -> str:
    shown = ", ".join(str(b.rank) for b in ballots[:most])
    more = f" and {len(ballots) - most} more" if len(ballots) > most else ""
    return f"rank{'s' if len(ballots) > 1 else ''} {shown}{more}"
