"""``Region``: torch's autocast state, entered and put back."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from .._torch import float16_regions, private
from ..errors import ArgumentTypeError, AutocastStateError
from . import engines
from .decorator import decorate

_F = TypeVar("_F", bound=Callable[..., Any])

_is_enabled = torch.is_autocast_enabled


_set_enabled = torch.set_autocast_enabled


_get_dtype = torch.get_autocast_dtype


_set_dtype = torch.set_autocast_dtype
_FLOAT16 = torch.float16


_enter_nesting = torch.autocast_increment_nesting


_exit_nesting = torch.autocast_decrement_nesting


_clear_cache = torch.clear_autocast_cache


_is_cache_enabled = torch.is_autocast_cache_enabled


_set_cache_enabled = torch.set_autocast_cache_enabled


_function_mode_on = private.function_mode_enabled


_is_compiling = torch.compiler.is_compiling


_owners = engines.active


class _Entry(NamedTuple):
    """What one entry of a region found, to be put back when it is left; None: left as it was."""

    region: Region
    enabled: bool | None
    dtype: torch.dtype | None
    cache: bool | None
    level: int
    """torch's nesting count after this entry had raised it; 0: an entry below keeps it raised."""
    delegate: torch.autocast | None = None


_Found = tuple["Region", bool | None, torch.dtype | None, bool | None, int, torch.autocast | None]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Found] = []
        self.in_graph: list[Region] = []
        """Regions that a compiled graph has entered; they are the uppermost of the stack."""
        self.left_at_fork: list[Region] = []
        """Regions that the process was forked in, outermost first, and that the child has left."""
        self.holds = 0
        self.held: dict[str, torch.dtype] = {}
        """The dtype of the casts that are held, by device type; see ``hold_casts``."""


_thread = _Thread()
_holding = [0]
"""Blocks of ``hold_casts`` in all threads: a region looks at its thread's only if there are any."""
_holding_lock = threading.Lock()


def hold(on: bool) -> None:
    """Begin or end a block of ``hold_casts`` in this thread: its casts outlive its regions."""
    step = 1 if on else -1
    with _holding_lock:
        _holding[0] += step
    _thread.holds += step
    if on:
        _enter_nesting()
    else:
        _exit_nesting()
    if not _thread.holds:
        _thread.held.clear()


def _keeps_casts(device: str, dtype: torch.dtype, level: int) -> bool:
    """Whether a region must not drop casts: they are held in its dtype, and it is outermost."""
    if not _thread.holds or level != _thread.holds + 1:
        return False
    if _thread.held.get(device, dtype) is not dtype:
        _clear_cache()
    _thread.held[device] = dtype
    return True


@functools.cache
def _leave_in_forked_processes() -> None:
    """A forked process starts outside of all regions, as a new thread and a spawned one do."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
        os.register_at_fork(after_in_child=_leave_all)


def _leave_all() -> None:
    regions = [entry[0] for entry in _thread.stack]
    _thread.in_graph.clear()
    for region in reversed(regions):
        region.__exit__()
    # The child may run on to the end of the "with" blocks that it was forked in.
    _thread.left_at_fork += regions


def _leave_failed_graphs() -> None:
    """Leave what graphs have entered that ended with an error, which skips the calls that leave.

    Dynamo has put the autocast state itself back, and others may have changed it since.
    """
    stack, leaked = _thread.stack, _thread.in_graph
    while leaked:
        region = leaked.pop()
        at = next((i for i in reversed(range(len(stack))) if stack[i][0] is region), None)
        if at is not None:
            stack[at] = (region, None, None, None, stack[at][4], stack[at][5])
            region.__exit__()


def innermost() -> Region:
    """The innermost region that this thread is in."""
    return _thread.stack[-1][0]


def depth() -> int:
    """How many entered regions this thread is in."""
    return len(_thread.stack)


def push_delegate(region: Region, delegate: torch.autocast) -> None:
    """Note that ``region`` has been entered by entering ``delegate``; leaving it leaves that."""
    _thread.stack.append((region, None, None, None, 0, delegate))


class Region(torch.autocast):
    """One validated autocast region; made by :func:`autocast`, entered as often as you like.

    The attributes are the ones that ``torch.autocast`` has and that other libraries read.
    """

    def __init__(
        self, device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool | None
    ) -> None:
        _leave_in_forked_processes()
        # torch's own __init__ checks again and, for an absent device, warns and turns itself off.
        self.device = device_type
        self.fast_dtype = dtype
        self._enabled = enabled
        self._cache_enabled = cache_enabled  # type: ignore[assignment]  # None: as it is on enter
        self.custom_backend_name = private.privateuse1_name()

    def __enter__(self) -> Region:
        stack = _thread.stack
        if _owners and self._enabled:
            _owners[-1].tell()
            stack.append((self, None, None, None, 0, None))  # nothing to restore
            return self
        if _function_mode_on() and private.being_exported():
            return self._enter_delegate(stack)
        if stack and _thread.in_graph:
            _leave_failed_graphs()  # no graph is running: it would enter by begin()
        device = self.device
        depth = len(stack)
        found_enabled = found_dtype = found_cache = None
        level = 0
        kept = False
        try:
            if not depth:
                level = _enter_nesting()
                if _holding[0] and self._enabled:
                    kept = _keeps_casts(device, self.fast_dtype, level)
            # Each value is noted before it is set, so that an interrupt between the two restores.
            if self._enabled:
                if self.fast_dtype is _FLOAT16:
                    float16_regions.add(device)
                elif float16_regions and not depth:
                    float16_regions.discard(device)
                dtype = _get_dtype(device)
                if dtype is not self.fast_dtype:
                    found_dtype = dtype
                    _set_dtype(device, self.fast_dtype)
                    # torch's cache of cast weights is keyed by the weight alone: casts made for
                    # the surrounding region's dtype must not meet this one's inputs.
                    if not kept:
                        _clear_cache()
            enabled = _is_enabled(device)
            if enabled is not self._enabled:
                found_enabled = enabled
                _set_enabled(device, self._enabled)
            if self._cache_enabled is not None:
                cache = _is_cache_enabled()
                if cache is not self._cache_enabled:
                    found_cache = cache
                    _set_cache_enabled(self._cache_enabled)
            # A plain tuple: building an _Entry costs a tenth of the whole region.
            stack.append((self, found_enabled, found_dtype, found_cache, level, None))
            return self
        except BaseException:
            del stack[depth:]
            self._restore(found_enabled, found_dtype, found_cache, level)
            raise

    def __exit__(
        self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None
    ) -> Literal[False]:
        stack = _thread.stack
        if stack and stack[-1][0] is self:
            _, enabled, dtype, cache, level, delegate = stack.pop()
        else:
            _, enabled, dtype, cache, level, delegate = self._take_from_below(stack)
        if delegate is not None:
            delegate.__exit__(exc_type, exc_val, exc_tb)
            if dtype is not None:
                _clear_cache()
            return False
        try:
            self._restore(enabled, dtype, cache, level)
        except BaseException:  # an interrupt: do it again, and don't count down twice
            self._restore(enabled, dtype, cache, 0)
            if level:
                private.lower_nesting(level - 1)
            raise
        return False

    def _restore(
        self,
        enabled: bool | None,
        dtype: torch.dtype | None,
        cache: bool | None,
        level: int,
    ) -> None:
        if enabled is not None:
            _set_enabled(self.device, enabled)
        if dtype is not None:
            _set_dtype(self.device, dtype)
            if not (
                _holding[0] and self._enabled and _keeps_casts(self.device, self.fast_dtype, level)
            ):
                _clear_cache()
        if cache is not None:
            _set_cache_enabled(cache)
        outermost = level > 0 and _exit_nesting() == 0
        if outermost or (_CASTS_LACK_GRAD and not torch.is_grad_enabled()):
            _clear_cache()

    def _was_left_at_fork(self) -> bool:
        """Whether this exit belongs to an entry that a forked process has left already."""
        return self in _thread.left_at_fork and all(e[0] is not self for e in _thread.stack)

    def _enter_delegate(self, stack: list[_Found]) -> Region:
        # Under export's tracing torch's own object must be the one that enters: it records itself
        # in the graph. A new one each time, since it keeps its state on itself.
        delegate = private.plain_autocast(
            self.device, self.fast_dtype, self._enabled, self._cache_enabled
        )
        dtype = _get_dtype(self.device)
        changed = None if dtype is self.fast_dtype else dtype
        if changed is not None:
            _clear_cache()
        delegate.__enter__()  # type: ignore[no-untyped-call]
        stack.append(_Entry(self, None, changed, None, 0, delegate))
        return self

    def _take_from_below(self, stack: list[_Found]) -> _Entry:
        """Take this region's entry from below the top, handing what it would restore to the next.

        Happens when a suspended generator holds a region: regions end in another order than they
        began. What a region above would restore to becomes what this one had found.
        """
        at = next((i for i in reversed(range(len(stack))) if stack[i][0] is self), None)
        if at is None and self in _thread.left_at_fork:
            _thread.left_at_fork.remove(self)
            return _Entry(self, None, None, None, 0)
        if at is None:
            raise AutocastStateError(
                f"an autocast region of {self.device!r} was left in a thread that had not entered "
                "it; enter and leave a region in the same thread (use 'with')"
            )
        entry = _Entry(*stack.pop(at))
        if entry.delegate is not None:
            return entry
        counts = next((i for i in range(at, len(stack)) if stack[i][5] is None), None)
        if entry.level and counts is not None:
            stack[counts] = _Entry(*stack[counts])._replace(level=entry.level)
            entry = entry._replace(level=0)
        if entry.cache is not None:
            stack[at] = _Entry(*stack[at])._replace(cache=entry.cache)
            entry = entry._replace(cache=None)
        above = range(at, len(stack))
        same = next((i for i in above if stack[i][0].device == self.device), None)
        if same is not None:
            upper = _Entry(*stack[same])
            if entry.enabled is not None:
                upper = upper._replace(enabled=entry.enabled)
            if entry.dtype is not None:
                upper = upper._replace(dtype=entry.dtype)
            stack[same] = upper
            entry = entry._replace(enabled=None, dtype=None)
        return entry

    def __call__(self, func: _F) -> _F:
        """Decorate ``func``: a function, a coroutine function or a generator function."""
        if not (callable(func) or isinstance(func, classmethod)):
            raise ArgumentTypeError(
                f"autocast(...)(func) decorates a callable, got {type(func).__name__}; "
                "to use it as a context manager, write: with amphal.autocast(...):"
            )
        # Plain values, which Dynamo takes as constants: a function that calls itself then enters
        # a new region at each level, where one object entered twice is more than Dynamo can trace.
        values = (self.device, self.fast_dtype, self._enabled, self._cache_enabled)

        def region() -> torch.autocast:
            if _is_compiling():
                device, dtype, enabled, cache_enabled = values
                return torch.autocast(device, dtype, enabled, cache_enabled)
            return self

        return decorate(func, region)

    def __repr__(self) -> str:
        name = str(self.fast_dtype).removeprefix("torch.") if self._enabled else "disabled"
        return f"<amphal.autocast {self.device} {name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Region, (self.device, self.fast_dtype, self._enabled, self._cache_enabled)


# Up to torch 2.12 a cast made under no_grad is cached without a gradient, and a later forward in
# the same outermost region would find it.
_CASTS_LACK_GRAD = private.torch_version() < (2, 13)


private.not_as_frames(__name__)
