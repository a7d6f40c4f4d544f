"""A scaler's state: packed as plain numbers, loaded whole or not at all, pickled and copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from .._torch import private
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    ScalerStateError,
    StateDictError,
)
from . import arguments as rules
from . import gradients
from .scale import LOST, Scale

_S = TypeVar("_S", bound=Scale)

VERSION = 1
"""The version of this package's own part of a state."""

_OWN = "amphal"
_TORCHS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_COUNTERS = ("steps", "skipped", "consecutive_skips", "hysteresis_spent")


def pack(scaler: Scale) -> dict[str, Any]:
    """See :meth:`GradScaler.state_dict`."""
    if not scaler._enabled:
        return dict(scaler._kept_state)
    return {
        "scale": scaler.get_scale(),
        "growth_factor": scaler._growth_factor,
        "backoff_factor": scaler._backoff_factor,
        "growth_interval": scaler._growth_interval,
        "_growth_tracker": scaler._get_growth_tracker(),
        _OWN: {
            "version": VERSION,
            "steps": scaler.steps,
            "skipped": scaler.skipped,
            "consecutive_skips": scaler.consecutive_skips,
            "hysteresis_spent": int(scaler._hysteresis_spent),
        },
    }


def load(scaler: Scale, state: Any) -> None:
    """See :meth:`GradScaler.load_state_dict`."""
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(
            f"state_dict must be a dict, as state_dict() gives it, got {type(state).__name__}"
        )
    if not state:
        return
    values = _checked(scaler, state)
    counters = _checked_counters(state.get(_OWN))
    if not scaler._enabled:
        scaler._kept_state = dict(state)
        return
    scaler._count_history()  # on_skip still learns of what was not read yet
    scale, growth, backoff, interval, tracker = values
    scaler._init_scale, scaler._init_growth_tracker = scale, tracker
    scaler._growth_factor, scaler._backoff_factor = growth, backoff
    scaler._growth_interval = interval
    if scaler._scale is not None and scaler._growth_tracker is not None:
        before = scaler._before_move()
        scaler._scale.fill_(scale)
        scaler._after_move(before)
        scaler._growth_tracker.fill_(tracker)
        scaler._note_scale(gradients.float32(scale))
    scaler._history.reset(*counters[:3])
    scaler._hysteresis_spent = float(counters[3])
    scaler._history.tell(scaler._on_skip)


def _checked(scaler: Scale, state: Mapping[str, Any]) -> tuple[float, float, float, int, int]:
    missing = [key for key in _TORCHS if key not in state]
    if missing:
        raise StateDictError(
            f"the scaler's state has no {', '.join(missing)}; it has {', '.join(map(str, state))}. "
            "It must come from state_dict() of a scaler. Nothing was changed"
        )
    low, high = scaler._min_scale, scaler._max_scale
    try:
        interval = rules.growth_interval(state["growth_interval"])
        return (
            rules.scale("scale", state["scale"], low, high),
            rules.growth_factor(state["growth_factor"]),
            rules.backoff_factor(state["backoff_factor"]),
            interval,
            # torch compares for equality, so a longer run than the interval would never grow.
            min(rules.integer("_growth_tracker", state["_growth_tracker"], 0), interval - 1),
        )
    except (ArgumentError, ArgumentTypeError) as exc:
        raise StateDictError(f"a bad scaler state: {exc}. Nothing was changed") from exc


def _checked_counters(own: Any) -> tuple[int, int, int, int]:
    if own is None:
        return 0, 0, 0, 0
    if not isinstance(own, Mapping) or own.get("version") != VERSION:
        version = own.get("version") if isinstance(own, Mapping) else own
        raise StateDictError(
            f"the scaler's state has a part {_OWN!r} of version {version!r}, this amphal reads "
            f"version {VERSION}; install the amphal that wrote it or a newer one, or delete that "
            "entry, which holds only counters. Nothing was changed"
        )
    missing = [key for key in _COUNTERS if key not in own]
    if missing:
        raise StateDictError(
            f"the part {_OWN!r} of the scaler's state has no {', '.join(missing)}. "
            "Nothing was changed"
        )
    try:
        a, b, c, d = (rules.integer(key, own[key], 0) for key in _COUNTERS)
    except (ArgumentError, ArgumentTypeError) as exc:
        raise StateDictError(f"a bad scaler state: {exc}. Nothing was changed") from exc
    return a, b, c, d


def freeze(scaler: Scale) -> dict[str, Any]:
    """What is pickled: numbers for the tensors, nothing that belongs to this process."""
    if scaler._per_optimizer_states:
        raise ScalerStateError(
            "a scaler can be pickled or copied between iterations only: call scaler.update() first"
        )
    state = scaler.__dict__.copy()
    if scaler._enabled:
        state["_init_scale"] = scaler.get_scale()
        state["_init_growth_tracker"] = scaler._get_growth_tracker()
        counters = (scaler.steps, scaler.skipped, scaler.consecutive_skips)
        state["_counters"] = (*counters, float(scaler._hysteresis_spent))
    else:
        history = scaler._history
        state["_counters"] = (history.steps, history.skipped, history.consecutive, 0.0)
    state["_scale"] = state["_growth_tracker"] = state["_model"] = None
    for name in (
        "_history",
        "_outcomes",
        "_spent",
        "_ledger",
        "_scale_of_losses",
        "_seen",
        "_lower",
        "_hysteresis_spent",
    ):
        del state[name]
    if state.get("_process_group") is not None:
        state["_process_group"] = LOST
    return state


def thaw(scaler: Scale, state: dict[str, Any]) -> None:
    """The reverse of :func:`freeze`."""
    state = dict(state)
    *counters, spent = state.pop("_counters")
    kept = state.get("_kept_state", {})
    scaler.__dict__.update(state)
    scaler._start()
    scaler._kept_state = kept
    scaler._history.reset(*counters)
    scaler._hysteresis_spent = spent


def rebuild(cls: type[_S], state: dict[str, Any]) -> _S:
    """A scaler of this class from what :func:`freeze` gave, with no detection on the way."""
    scaler = object.__new__(cls)
    scaler.__setstate__(state)
    return scaler


private.not_as_frames(__name__)
