"""DeepSpeed: the precision blocks of its configuration, and peace with its engines.

A DeepSpeed engine owns mixed precision: it casts, and where fp16 needs it, it scales the loss.
Neither ``amphal.GradScaler`` nor an ``amphal.autocast`` region belongs beside it; a region that is
there all the same steps aside while a guarded engine runs, with one note.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import torch

from .._autocast import autocast, engines
from .._front import Plan
from ..contract import LOW_PRECISION
from ..errors import ArgumentError, ArgumentTypeError
from ._extra import framework, require_plan

__all__ = ["config", "guard", "initialize"]

_BLOCKS = ("bf16", "fp16", "torch_autocast")
_METHODS = ("backward", "train_batch", "eval_batch")


def config(
    plan: Plan, *, by: Literal["autocast", "engine"] = "autocast"
) -> dict[str, dict[str, Any]]:
    """The blocks ``bf16``, ``fp16`` and ``torch_autocast`` of a DeepSpeed configuration.

    All three are there, so that merging them over a configuration leaves none of its own on::

        config = {**settings, **amphal.integrations.deepspeed.config(plan)}

    Args:
        plan: the plan; on machines of different hardware the one that
            ``amphal.detect(process_group=...)`` agreed on.
        by: who casts. "autocast": torch's autocast inside the engine, op by op, parameters in
            float32, as ``amphal.autocast`` does. "engine": DeepSpeed holds the parameters in the
            low precision beside a float32 copy, and runs every op in it.

    Raises:
        ArgumentError: another ``by``, or an fp16 plan of hardware where no scaler can see an
            overflow.
    """
    return _blocks(require_plan(plan, "config"), by)


def _blocks(plan: Plan, by: str) -> dict[str, dict[str, Any]]:
    if by not in ("autocast", "engine"):
        raise ArgumentError(f"by must be 'autocast' or 'engine', got {by!r}")
    half = plan.dtype is torch.float16
    if half and not plan.use_scaler:
        raise ArgumentError(
            f"DeepSpeed scales the loss for fp16, and {plan.hardware.name} saturates instead of "
            "overflowing, so its scaler could see nothing; detect another precision"
        )
    blocks: dict[str, dict[str, Any]] = {name: {"enabled": False} for name in _BLOCKS}
    if plan.dtype not in LOW_PRECISION:
        return blocks
    if by == "autocast":
        dtype = str(plan.dtype).removeprefix("torch.")
        blocks["torch_autocast"] = {"enabled": True, "dtype": dtype}
    elif half:
        blocks["fp16"] = {"enabled": True, "loss_scale": 0}  # 0: dynamic
    else:
        blocks["bf16"] = {"enabled": True}
    return blocks


def initialize(
    plan: Plan,
    *,
    config: Mapping[str, Any],
    by: Literal["autocast", "engine"] = "autocast",
    **arguments: Any,
) -> Any:
    """``deepspeed.initialize`` with the plan's precision, and the engine guarded.

    Args:
        config: the rest of the configuration, as a dict; its precision blocks are the plan's.
        by: as in :func:`config`.
        arguments: what ``deepspeed.initialize`` takes besides: ``model=``, ``optimizer=``, ...

    Returns:
        What ``deepspeed.initialize`` returns: engine, optimizer, data loader, scheduler.

    Raises:
        MissingExtraError: DeepSpeed is not installed.
    """
    if not isinstance(config, Mapping):
        raise ArgumentTypeError(
            f"config must be a dict, as json.load() of a DeepSpeed file gives, "
            f"got {type(config).__name__} ({config!r})"
        )
    blocks = _blocks(require_plan(plan, "initialize"), by)
    made = framework("deepspeed", "deepspeed").initialize(config={**config, **blocks}, **arguments)
    guard(made[0])
    return made


def guard(engine: Any) -> Any:
    """Let ``amphal.autocast`` know when ``engine`` runs, to step aside then; gives the engine back.

    A region that is entered while the engine's forward or backward runs does nothing, and one that
    surrounds a call of the engine is off inside it; the first of either is noted once, by an
    ``EngineWarning``. Regions that switch autocast off stay in force. An engine whose configuration
    owns no mixed precision is left as it is.

    Raises:
        ArgumentTypeError: something that is no DeepSpeed engine.
    """
    owned = _owned(engine)
    if owned is None or getattr(engine, "_amphal_guarded", False):
        return engine
    owner = engines.Owner(f"the DeepSpeed engine ({owned})")
    calls: list[ExitStack] = []

    def enter(*_: object) -> None:
        calls.append(_enter(owner, engine.device.type))

    def leave(*_: object) -> None:
        calls.pop().close()

    engine.register_forward_pre_hook(enter, prepend=True)
    engine.register_forward_hook(leave, always_call=True)
    for name in _METHODS:
        method = getattr(engine, name, None)
        if callable(method):
            setattr(engine, name, _inside(owner, engine, method))
    engine._amphal_guarded = True
    return engine


def _owned(engine: Any) -> str | None:
    """Which block of the engine's configuration owns mixed precision, or None."""
    try:
        asked = {
            "bf16": engine.bfloat16_enabled(),
            "fp16": engine.fp16_enabled(),
            "torch_autocast": engine.torch_autocast_enabled(),
        }
    except AttributeError as exc:
        raise ArgumentTypeError(
            f"guard() takes a DeepSpeed engine, as deepspeed.initialize() gives first, "
            f"got {type(engine).__name__}, which has no {exc.name}()"
        ) from exc
    return next((name for name, on in asked.items() if on), None)


def _enter(owner: engines.Owner, device_type: str) -> ExitStack:
    stack = ExitStack()
    if torch.is_autocast_enabled(device_type):
        owner.tell()
        stack.enter_context(autocast(device_type, enabled=False))
    stack.enter_context(engines.running(owner))
    return stack


def _inside(owner: engines.Owner, engine: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _enter(owner, engine.device.type):
            return method(*args, **kwargs)

    return wrapper
