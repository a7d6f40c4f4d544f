"""The region that ``autocast(ops=...)`` makes, in eager code and in graphs."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from .. import _warnings
from .._casting import policy as policies
from .._choice import Choice, choose
from .._torch import private
from ..contract import OpLists
from ..errors import ArgumentTypeError, OpPolicyError, PrecisionWarning
from . import arguments as argument_rules
from . import export
from . import region as regions
from .decorator import decorate
from .region import Region

__all__ = ["PolicyRegion", "build", "region", "traced"]


class PolicyRegion(Region, TorchFunctionMode):
    """A region with its own casting policy.

    It is a function mode for Dynamo's sake, which reads only four attributes of an autocast region
    made outside a compiled function, but traces a mode's ``__torch_function__``. In eager code it
    is never on the stack of modes.
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype,
        enabled: bool,
        cache_enabled: bool | None,
        policy: policies.Policy,
    ) -> None:
        super().__init__(device_type, dtype, enabled, cache_enabled)
        self._policy = policy
        self.index = next(_numbers)
        self.name = str(self.index)  # Dynamo makes different ints a symbol, and strings constants
        _regions[self.index] = self

    @property
    def policy(self) -> policies.Policy:
        """The policy, held against the device's own lists as they are now."""
        return policies.current(self._policy)

    def __enter__(self) -> PolicyRegion:
        if not self._enabled:
            super().__enter__()
            return self
        depth = regions.depth()
        try:
            if private.being_exported():
                self._enter_recording()
            else:
                super().__enter__()
                self._show_as_mode()
            if regions._holding[0]:
                torch.clear_autocast_cache()  # a cast that is held was made by another policy
            policies.enter(self, self.policy)
        except BaseException:  # an interrupt too
            self._leave_modes()
            if regions.depth() > depth:
                super().__exit__()
            raise
        return self

    def __exit__(
        self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None
    ) -> Literal[False]:
        try:
            if self._enabled and not self._was_left_at_fork():
                try:
                    policies.leave(self)
                finally:
                    self._leave_modes()
                if regions._holding[0]:
                    torch.clear_autocast_cache()
        finally:  # after an interrupt too
            super().__exit__(exc_type, exc_val, exc_tb)
        if exc_type is RuntimeError and self._enabled:
            self._explain(exc_val)
        return False

    def _explain(self, error: Any) -> None:
        number = str(error).startswith(private.NUMBER_WITHOUT_VALUE)
        if number and private.came_through_transform(error):
            raise OpPolicyError(
                "torch.func gives a cast kernel no Python number, as in 'x * 2': of the ops that "
                f"ops= names ({', '.join(sorted(self._policy.table)[:8])}), one was called with a "
                "number inside torch.func.grad, jvp or jacrev. Write the number as a tensor, such "
                "as 'x * torch.tensor(2.0)', cast the tensor there by hand, or leave the op out"
            ) from error

    def _enter_recording(self) -> None:
        # What is recorded has its casts, so torch's own region, which records itself, is off.
        delegate = private.plain_autocast(self.device, self.fast_dtype, False, self._cache_enabled)
        delegate.__enter__()  # type: ignore[no-untyped-call]
        regions.push_delegate(self, delegate)
        self._enter_mode(export.Bake(self, regions.innermost))

    def _show_as_mode(self) -> None:
        if "torch._dynamo" in sys.modules and not private.dynamo_guards_on_autocast():
            # Dynamo guards on the stack of modes in every torch. It costs each op 2 us there.
            self._enter_mode(_Shown(self))

    def _enter_mode(self, mode: TorchFunctionMode) -> None:
        mode.__enter__()  # type: ignore[no-untyped-call]
        _thread.modes.append((self, mode))

    def _leave_modes(self) -> None:
        modes = _thread.modes
        at = next((i for i in reversed(range(len(modes))) if modes[i][0] is self), None)
        if at is not None:  # below others too: a suspended generator may hold a region
            private.take_mode_off(modes.pop(at)[1])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Dynamo comes here, for each function that it traces in the region, and eager code after a
        # graph break, where the region has been entered as any other.
        if not torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        _allow_in_graphs()
        if self.name:  # always; Dynamo knows a constant once it is compared
            _refuse_others_inside(self.name)
        begin(self.index)
        result = func(*args, **(kwargs or {}))
        end(self.index)
        return result

    def __call__(self, func: Any) -> Any:
        """Decorate ``func``: a function, a coroutine function or a generator function."""
        if not callable(func):
            return super().__call__(func)
        return decorate(func, self._here)

    def _here(self) -> Any:
        if not torch.compiler.is_compiling():
            return self
        _allow_in_graphs()
        return Traced(self.index)

    def __reduce__(self) -> tuple[Any, ...]:
        ops = self._policy.given
        return region, (self.device, self.fast_dtype, self._enabled, self._cache_enabled, ops)


class _Shown(TorchFunctionMode):
    """Stands for a region on the stack of modes, where Dynamo sees it."""

    def __init__(self, region: PolicyRegion) -> None:
        super().__init__()
        self.index = region.index

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        _allow_in_graphs()
        begin(self.index)
        result = func(*args, **(kwargs or {}))
        end(self.index)
        return result


class _Thread(threading.local):
    def __init__(self) -> None:
        self.modes: list[tuple[PolicyRegion, Any]] = []


_thread = _Thread()
# Graphs call regions by number. A number is never used again.
_numbers = itertools.count()
_regions: weakref.WeakValueDictionary[int, PolicyRegion] = weakref.WeakValueDictionary()
# Made inside compiled functions: only their graphs know them. One per region and compilation.
_in_graphs: dict[int, PolicyRegion] = {}
_made: dict[tuple[Any, ...], PolicyRegion] = {}
_by_arguments: dict[tuple[Any, ...], PolicyRegion] = {}
_MOST = 512
"""How many regions are kept ready in each of the two; a full one starts anew."""
choose.on_clear(_by_arguments.clear)


def build(device: Any, dtype: Any, enabled: Any, cache_enabled: Any, ops: Any) -> PolicyRegion:
    """The region of these arguments of ``autocast``, validated at the first call with them."""
    content = ops if isinstance(ops, OpLists) else _content(ops)
    arguments = (device, dtype, enabled, cache_enabled, content)
    # By identity: equal keys such as 1 are no flags, and must not find what True has left here.
    if (enabled is True or enabled is False) and (
        cache_enabled is None or cache_enabled is True or cache_enabled is False
    ):
        try:
            return _by_arguments[arguments]
        except (KeyError, TypeError):
            pass
    if callable(device) and not isinstance(device, torch.nn.Module):
        raise ArgumentTypeError(
            "autocast() got a function and other arguments; write "
            "@amphal.autocast(ops=...), which decorates the function below it"
        )
    made = region(
        *argument_rules.settled(device, dtype, enabled, cache_enabled), cache_enabled, ops
    )
    if enabled and dtype is None and not made._enabled:
        _tell_of_no_effect(made.device)
    if isinstance(device, Choice) or (device is not None and dtype is not None):
        # Only answers that detect() has no part in: the current device may change.
        if len(_by_arguments) >= _MOST:
            _by_arguments.clear()
        _by_arguments[arguments] = made
    return made


@functools.cache
def _tell_of_no_effect(device: str) -> None:
    _warnings.warn(
        f"ops= has no effect: this region is full precision (no dtype was named, and the plan for "
        f"{device!r} is fp32); name dtype='bf16' or 'fp16' for a region that casts",
        PrecisionWarning,
    )


def _content(ops: Any) -> Any:
    return tuple(ops.items()) if isinstance(ops, Mapping) else ops


def region(
    device: str, low: torch.dtype, on: bool, cache_enabled: bool | None, ops: Any
) -> PolicyRegion:
    """The region of these settings, of which only ``ops`` is still to be validated."""
    policy = policies.policy(device, low, ops)
    key = (device, low, on, cache_enabled, policy)
    made = _made.get(key)
    if made is None:
        if len(_made) >= _MOST:
            _made.clear()
        made = _made[key] = PolicyRegion(device, low, on, cache_enabled, policy)
    return made


def _numbered(index: Any) -> PolicyRegion:
    return _regions[int(index)]  # while Dynamo traces it is a symbol


def begin(index: int) -> None:
    """In a graph: enter the region of this number."""
    region, thread = _numbered(index), regions._thread
    depth, in_graph = len(policies.owners()), thread.in_graph
    thread.in_graph = []  # what this graph has entered has not been left behind
    try:
        region.__enter__()
    finally:
        thread.in_graph = in_graph
    in_graph.append(region)
    private.when_trace_ends(functools.partial(_unwind, depth))


def end(index: int) -> None:
    """In a graph: leave the region of this number."""
    in_graph = regions._thread.in_graph
    if in_graph:
        in_graph.pop()
    _numbered(index).__exit__()


def _unwind(depth: int) -> None:
    """Leave what a trace that failed had entered."""
    in_graph = regions._thread.in_graph
    for owner in reversed(policies.owners()[depth:]):
        if in_graph and in_graph[-1] is owner:
            in_graph.pop()
        owner.__exit__()


class Traced:
    """A region in a function that is being traced: all that it does is two calls in the graph."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        begin(self.index)

    def __exit__(self, *exc: object) -> None:
        end(self.index)


def traced(device: Any, dtype: Any, enabled: Any, cache_enabled: Any, ops: Any) -> Any:
    """The region for a function that Dynamo traces."""
    if isinstance(device, Choice):
        dtype = device.dtype if dtype is None else dtype
        device = device.device.type
    elif isinstance(device, torch.device):
        device = device.type
    return Traced(_settled_index(device, dtype, enabled, cache_enabled, ops))


@private.constant_in_graphs
def _settled_index(device: Any, dtype: Any, enabled: Any, cache_enabled: Any, ops: Any) -> int:
    _allow_in_graphs()
    made = build(device, dtype, enabled, cache_enabled, ops)
    _in_graphs[made.index] = made
    return made.index


@private.constant_in_graphs
def _refuse_others_inside(name: str) -> None:
    if private.other_region_in_graph(_numbered(name), begin, end):
        raise OpPolicyError(
            "a region with ops= that was made outside a compiled function and is entered in it has "
            "another region inside: Dynamo would let the outer one override it. Make the region "
            "where it is entered, as in 'with amphal.autocast(..., ops=...):', decorate the "
            "function with it, or enter it around the call of the compiled function"
        )


@private.constant_in_graphs
def _allow_in_graphs() -> None:
    private.allow_in_graph(begin)
    private.allow_in_graph(end)


private.not_as_frames(__name__)
