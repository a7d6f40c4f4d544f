"""``amphal.precast_``: frozen weights kept in the precision to which autocast would cast them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from .. import _front
from .._casting import op_lists
from .._front import Plan
from ..contract import LOW_PRECISION, short_name
from ..errors import ArgumentError, ArgumentTypeError, PrecastError
from .readers import weights_of
from .search import Job
from .stored import State, originals, states_in, stored_in

__all__ = ["PrecastReport", "full_precision_state_dict", "precast_", "undo_precast_"]


@dataclass(frozen=True)
class PrecastReport:
    """What :func:`precast_` did to a model."""

    dtype: torch.dtype
    """The low precision, or float32 where the plan is full precision and nothing was done."""
    cast: tuple[str, ...]
    """The parameters that are stored low now; a tied one by the first of its names."""
    left: Mapping[str, str] = field(hash=False)
    """The frozen parameters that are not, and why; read-only."""
    bytes_saved: int
    """What the parameters take less. Kept originals, if any, are not counted against it."""
    bytes_kept: int
    """What the kept originals take in host memory."""
    verified: tuple[str, ...]
    """In which modes the outputs were compared, bit for bit: ``"eval, no grad"``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", MappingProxyType(dict(self.left)))

    def __reduce__(self) -> tuple[Any, ...]:
        return PrecastReport, tuple(self.to_dict(plain=False).values())

    def to_dict(self, *, plain: bool = True) -> dict[str, Any]:
        """The report as plain JSON-able values."""
        return {
            "dtype": short_name(self.dtype) if plain else self.dtype,
            "cast": list(self.cast) if plain else self.cast,
            "left": dict(self.left),
            "bytes_saved": self.bytes_saved,
            "bytes_kept": self.bytes_kept,
            "verified": list(self.verified) if plain else self.verified,
        }

    def __str__(self) -> str:
        """A line, and a line for each reason why parameters were left."""
        lines = [
            f"{len(self.cast)} parameters are stored in {short_name(self.dtype)}, "
            f"{_size(self.bytes_saved)} less"
            + (f"; {_size(self.bytes_kept)} of originals kept" if self.bytes_kept else "")
            + (f"; verified: {'; '.join(self.verified)}" if self.verified else "")
        ]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"left {', '.join(names[:3])}{more}: {reason}")
        if not self.cast and not self.left:
            lines.append(
                "no floating-point parameter is frozen: model.requires_grad_(False) freezes all"
            )
        return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def precast_(
    model: nn.Module,
    *,
    example_inputs: Any = None,
    plan: Plan | None = None,
    keep_originals: bool = False,
) -> PrecastReport:
    """Store in the low precision the frozen parameters that autocast casts at each use anyway.

    The outputs in a region of the plan stay the same, bit for bit; the parameters take half the
    memory and are not cast again. Outside such a region the model raises :class:`PrecastError`.
    The parameters stay the same objects. :func:`undo_precast_` undoes it.

    Args:
        model: a module whose frozen parameters (``requires_grad=False``) are to be stored low.
        example_inputs: inputs to try the model on: a tensor, a tuple of arguments, a dict of
            keyword arguments, ``(args, kwargs)``, or a function that takes the model and runs it.
            What reads each parameter is watched, and the outputs (with the gradients of what
            trains) are compared before and after, in training and eval mode, with gradients and
            without. Without them only parameters in torch's own modules qualify, with nothing but
            torch's own modules around them.
        plan: the device and dtype to run in; None for those that :func:`detect` chooses for the
            device of the parameters. A plan of float32 does nothing.
        keep_originals: keep the exact values in host memory for :func:`undo_precast_` and
            :func:`full_precision_state_dict`.

    Returns:
        What was done. A second call finds it done.

    Raises:
        ArgumentError, ArgumentTypeError: a model or inputs that can't be worked with.
        PrecastError: the model was precast otherwise, or does not give the same outputs twice.
    """
    _check(model)
    plan = _plan_for(model) if plan is None else plan
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(f"plan must be an amphal.Plan or None, got {plan!r}")
    low, device_type = plan.dtype, plan.hardware.device_type
    frozen = [w for w in weights_of(model) if not w.param.requires_grad]
    state = vars(model).get("_amphal_precast")
    if state is not None and (state.low, state.device_type) != (low, device_type):
        raise PrecastError(
            f"the model is precast to {short_name(state.low)} on {state.device_type!r}, and the "
            f"plan is {short_name(low)} on {device_type!r}: amphal.undo_precast_(model) first"
        )
    if low not in LOW_PRECISION:
        return _report(low, state, {w.name: "the plan is full precision" for w in frozen}, ())
    lowered = frozenset(op_lists(device_type, low).lower_precision)
    if state is None:
        state = State(low, device_type, lowered)
    done = {name for s in state.stored.values() for name in s.names}
    job = Job(model, plan, lowered, state, keep_originals)
    # What is made in inference mode can't take part in training later.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        job.run([w for w in frozen if w.name not in done], example_inputs)
    return _report(low, state, job.left, job.verified)


def _report(
    low: torch.dtype, state: State | None, left: Mapping[str, str], verified: tuple[str, ...]
) -> PrecastReport:
    stored = list(state.stored.values()) if state is not None else []
    kept = sum(s.kept.nbytes for s in stored if s.kept is not None)
    saved = sum(s.bytes_saved for s in stored)
    return PrecastReport(low, tuple(s.name for s in stored), left, saved, kept, verified)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"precast_() takes an nn.Module, got {type(model).__name__}")
    if any(hasattr(m, "_orig_mod") for m in model.modules()):
        raise ArgumentError(
            "the model holds a compiled module, whose kernels can't be watched: call precast_ "
            "before torch.compile"
        )


def _plan_for(model: nn.Module) -> Plan:
    frozen = next((w.param for w in weights_of(model) if not w.param.requires_grad), None)
    return _front.detect(None if frozen is None else frozen.device)


def undo_precast_(
    model: nn.Module, *, state_dict: Mapping[str, Any] | None = None, rounded: bool = False
) -> tuple[str, ...]:
    """Undo :func:`precast_` on a model and on the modules in it.

    Args:
        model: the model; one that is not precast is left as it is.
        state_dict: the original values by name, as in the checkpoint that the model was loaded
            from. They must round to what is stored. Not needed where the originals were kept.
        rounded: where the original values are not to be had, go on with the stored ones, in the
            original dtype.

    Returns:
        The names of the parameters that were restored.

    Raises:
        StateDictError: original values are missing or not those of this model.
        PrecastError: a stored parameter has a gradient, is no parameter any more, or was precast
            with a larger model. Whatever is raised, nothing was changed.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"undo_precast_() takes an nn.Module, got {type(model).__name__}")
    if state_dict is not None and not isinstance(state_dict, Mapping):
        raise ArgumentTypeError(
            f"state_dict must be a mapping of names to tensors, got {type(state_dict).__name__}"
        )
    found = [
        (m, s, list(originals(s.stored.values(), _below(model, m, state_dict), rounded)))
        for m, s in states_in(model)
    ]
    known = {id(s) for _, _, values in found for s, _ in values}
    for stored in stored_in(model):
        if id(stored) not in known:
            raise PrecastError(
                f"{stored.name} was precast with another model, of which this is a part or a copy: "
                "undo_precast_ that one"
            )
        if stored.param.grad is not None:
            raise PrecastError(
                f"{stored.name} has a gradient of the stored precision: set .grad to None first"
            )
    names = []
    with torch.inference_mode(False), torch.no_grad():
        for module, state, values in found:
            prefix = _prefix(model, module)
            for stored, value in values:
                stored.put(value)
                names.append(prefix + stored.name)
            state.detach(module)
    torch.clear_autocast_cache()
    return tuple(names)


def full_precision_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` with the parameters that are stored low in their original dtype.

    With the original values where they were kept, else with the stored ones. ``model.state_dict()``
    itself holds what is stored.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"it takes an nn.Module, got {type(model).__name__}")
    state_dict = model.state_dict()
    full = {
        id(stored.param): value for stored, value in originals(stored_in(model), None, rounded=True)
    }
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in full and name in state_dict:
            state_dict[name] = full[id(param)]
    return state_dict


def _prefix(model: nn.Module, module: nn.Module) -> str:
    path = next(name for name, m in model.named_modules() if m is module)
    return f"{path}." if path else ""


def _below(
    model: nn.Module, module: nn.Module, state_dict: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    if state_dict is None:
        return None
    prefix = _prefix(model, module)
    return {n.removeprefix(prefix): v for n, v in state_dict.items() if n.startswith(prefix)}
