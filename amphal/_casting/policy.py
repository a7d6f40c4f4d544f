"""``autocast(ops=...)``: a region with its own casting policy.

The policy in force is the thread's. Its kernels stand on the device's autocast key, which is the
process's, from the first region that needs them to the last; a kernel asks which policy its thread
has and, if that does not name the op, does what would have been done without it. An op that no
region names has no kernel here and costs nothing.

torch.compile: the policy is also written into thread state that Dynamo guards on
(``private.marker_devices``), so a function compiled under one policy never runs under another. A
region inside a compiled function is two calls in the graph, :func:`begin` and :func:`end`.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from .._torch import private
from ..contract import OpLists, expand_lists, op_names
from ..errors import AutocastStateError, OpPolicyError
from . import installed, kernels, live_lists, rules
from .kernels import PASS_BY

__all__ = [
    "Effective",
    "Policy",
    "active",
    "current",
    "enter",
    "kernel_of",
    "leave",
    "observe",
    "policy",
]

_Table = Mapping[str, str]


class Policy:
    """A validated ``ops=``: what each op is to do on one device type.

    What the device does by itself is read once, and anew when a rule of
    :func:`amphal.register_autocast_op` comes or goes; :func:`current` gives the one for now.
    """

    def __init__(
        self, device: str, low: torch.dtype, table: _Table, whole: bool, given: Any
    ) -> None:
        self.device = device
        self.given = given
        self.low, self.generation = low, _generation[0]
        self.key = private.autocast_key(device)
        lists = live_lists.op_lists(device, low)
        builtin = {op: PASS_BY if p == "as_is" else p for op, p in lists}
        torchs = frozenset(builtin).difference(rules.registered_policies(device))
        content = (frozenset(builtin.items()), torchs)
        self.builtin, self.torchs = _device_lists.setdefault(content, (builtin, torchs))
        if whole:
            # A whole set of lists speaks for every op: those that it leaves out are not cast.
            table = {**dict.fromkeys(self.builtin, PASS_BY), **table}
        self.table = table


_lock = threading.RLock()
_generation = [0]
_policies: dict[tuple[Any, ...], Policy] = {}
# What devices do by themselves, and the ops that torch lists. By content: policies share it.
_device_lists: dict[Any, tuple[dict[str, str], frozenset[str]]] = {}


def policy(device: str, low: torch.dtype, ops: Mapping[str, str] | OpLists) -> Policy:
    """Validate ``ops`` for a device.

    Raises:
        ArgumentTypeError, OpPolicyError: as :func:`amphal.contract.op_names.expand`.
    """
    whole = isinstance(ops, OpLists)
    table = expand_lists(ops) if isinstance(ops, OpLists) else op_names.expand(ops)
    if whole:
        table = {op: PASS_BY if policy == "as_is" else policy for op, policy in table.items()}
    content = (device, low, whole, tuple(sorted(table.items())))
    with _lock:
        if content not in _policies:
            if len(_policies) >= MOST_KEPT:
                _policies.clear()  # regions keep theirs; equal ones share an Effective
            given = ops if isinstance(ops, OpLists) else dict(ops)
            _policies[content] = Policy(device, low, table, whole, given)
        return _policies[content]


def current(made: Policy) -> Policy:
    """The policy of the same content that holds now: ``made``, if no rule came or went since."""
    if made.generation == _generation[0]:
        return made
    return policy(made.device, made.low, made.given)


def _lists_changed() -> None:
    with _lock:
        _generation[0] += 1
        _device_lists.clear()
        _policies.clear()
        _effectives.clear()
        _outermost.clear()


class Effective:
    """The policy in force in a thread: the regions it is in, merged, the innermost winning."""

    def __init__(self, tables: dict[str, _Table], builtins: dict[str, Policy]) -> None:
        self.tables = tables
        self.builtins = builtins
        self.actions: dict[tuple[str, str], kernels.Action] = {}
        changed = {}
        for key, table in tables.items():
            policy = builtins[key]
            for op, wanted in table.items():
                if not _same(op, wanted, policy.builtin.get(op, PASS_BY)):
                    self.actions[op, key] = kernels.action(op, wanted, policy.device)
                    changed[op, key] = wanted
        self.kernels = installed.KernelSet(
            {pair: kernel_of(*pair, builtins[pair[1]]) for pair in self.actions},
            added=[(op, key) for op, key in self.actions if op not in builtins[key].torchs],
        )
        self.marks = _marks(frozenset(changed.items()))
        self.within: dict[Policy, Effective] = {}
        self.retired = False
        """No longer to be entered: its marks may soon stand for another policy."""


# One per op that a region has named: as many as there are ops.
_functions: dict[tuple[str, str, bool], Any] = {}


def kernel_of(op: str, key: str, policy: Policy) -> Any:
    """The one kernel of an op that regions name: the thread's own policy, else what torch does."""
    found = (op, key, op in policy.torchs)
    if found not in _functions:
        _functions[found] = _make_kernel(op, key, policy)
    return _functions[found]


def _make_kernel(op: str, key: str, policy: Policy) -> Any:
    pair, thread = (op, key), _thread
    otherwise = _built_in(op, key, policy)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if thread.observer is not None:
            return observed_call(keyset, args, kwargs)
        effective = thread.active
        if effective is not None:
            run = effective.actions.get(pair)
            if run is not None:
                return run(keyset, args, kwargs)
        return otherwise(keyset, args, kwargs)

    def observed_call(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        effective = thread.active
        run = effective.actions.get(pair) if effective is not None else None
        wanted = effective.tables[key].get(op) if effective is not None and run else None
        name = wanted or policy.builtin.get(op, PASS_BY)
        action = run or otherwise
        return thread.observer(op, name, lambda: action(keyset, args, kwargs), (args, kwargs))

    return kernel


def observe(observer: Any) -> Any:
    """Call ``observer`` instead of each kernel in this thread; gives back the one before."""
    before, _thread.observer = _thread.observer, observer
    return before


def _built_in(op: str, key: str, policy: Policy) -> kernels.Action:
    if op not in policy.torchs:
        return rules.rule_or_pass_by(op, policy.device)
    handle = private.kernel_handle(op_names.qualified(op), key)
    if handle is None:
        return kernels.action(op, policy.builtin[op], policy.device)
    call = handle.call_boxed
    return lambda keyset, args, kwargs: call(keyset, *args, **kwargs)


def _same(op: str, wanted: str, builtin: str) -> bool:
    """Whether torch does by itself what is wanted, so that no kernel is needed."""
    if wanted == "fp32":
        return builtin in ("fp32", "fp32_set_opt_dtype")
    if wanted == "as_is" and builtin == PASS_BY:
        return not private.is_composite(op_names.op_overload(op))
    return wanted == builtin


Marks = tuple[tuple[str, torch.dtype], ...]
_known_marks: dict[frozenset[Any], Marks] = {}
_effectives: dict[frozenset[Any], Effective] = {}
_outermost: dict[Policy, Effective] = {}
rules.on_change(_lists_changed)


def _marks(changes: frozenset[Any]) -> Marks:
    """How to mark a thread that has these changes in force: a dtype for each marker device.

    By their content, so that the marks mean the same in every process that shares a disk cache of
    compiled graphs.
    """
    if not changes or not private.dynamo_guards_on_autocast():
        return ()
    if changes not in _known_marks:
        dtypes = private.all_dtypes()
        places = list(private.marker_devices())
        capacity = len(dtypes) ** len(places)
        taken = set(_known_marks.values())
        digest = hashlib.sha256(repr(sorted(changes)).encode()).digest()
        start = int.from_bytes(digest[:8], "big")
        for code in range(start, start + capacity):
            digits = [code // len(dtypes) ** i % len(dtypes) for i in range(len(places))]
            marks = tuple((p, dtypes[d]) for p, d in zip(places, digits, strict=True))
            if marks not in taken:
                break
        else:
            raise OpPolicyError(
                f"{capacity} different casting policies are in use, which is all that "
                "can be told apart under torch.compile at one time"
            )
        _known_marks[changes] = marks
    return _known_marks[changes]


MOST_KEPT = 1024
"""How many policies are kept ready; fewer than there are marks."""

_alive: weakref.WeakSet[Effective] = weakref.WeakSet()


def _forget() -> None:
    """Forget every policy that no thread is in, so that their memory and marks are free again.

    Graphs compiled under a forgotten policy would fit the next one that gets its marks, so Dynamo
    forgets its graphs too. While it traces it cannot, and nothing is forgotten.
    """
    if not private.forget_graphs():
        return
    everything = list(_alive)
    # First retire, then count: a thread that enters does it the other way round.
    for effective in everything:
        effective.retired = True
        effective.within.clear()
    in_use = {effective.marks for effective in everything if effective.kernels.held}
    for changes, marks in list(_known_marks.items()):
        if marks not in in_use:
            del _known_marks[changes]
    _policies.clear()
    _effectives.clear()
    _outermost.clear()


def _merge(outer: Effective | None, inner: Policy) -> Effective:
    """The one record of ``inner`` within ``outer``."""
    with _lock:
        if max(len(_effectives), len(_known_marks)) >= MOST_KEPT:
            _forget()
        tables = dict(outer.tables) if outer else {}
        builtins = dict(outer.builtins) if outer else {}
        tables[inner.key] = {**tables.get(inner.key, {}), **inner.table}
        builtins[inner.key] = inner
        content: frozenset[Any] = frozenset(
            (key, op, p) for key, t in tables.items() for op, p in t.items()
        )
        content |= {(key, policy.generation) for key, policy in builtins.items()}
        if content not in _effectives:
            _effectives[content] = Effective(tables, builtins)
            _alive.add(_effectives[content])
        effective = _effectives[content]
        known = _outermost if outer is None else outer.within
        if len(known) >= MOST_KEPT:
            known.clear()
        known[inner] = effective
        return effective


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[object, Effective]] = []
        self.active: Effective | None = None
        self.observer: Any = None
        """Is called for each call of an op that has a kernel here; see ``observe``."""


_thread = _Thread()


def active() -> Effective | None:
    """The policy in force in this thread."""
    return _thread.active


def owners() -> list[Any]:
    """Whoever entered the policies of this thread, outermost first."""
    return [owner for owner, _ in _thread.stack]


def enter(owner: object, inner: Policy) -> None:
    """Put ``inner`` in force in this thread until ``owner`` leaves, over the policies that are."""
    thread = _thread
    outer = thread.active
    while True:
        known = _outermost if outer is None else outer.within
        effective = known.get(inner) or _merge(outer, inner)
        effective.kernels.hold()
        if not effective.retired:
            break
        effective.kernels.drop()  # another thread has just forgotten it
    depth = len(thread.stack)
    try:
        thread.stack.append((owner, effective))
        thread.active = effective
        _show(outer, effective)
    except BaseException:
        del thread.stack[depth:]
        thread.active = outer
        effective.kernels.drop()
        raise


def leave(owner: object) -> None:
    """Undo the last :func:`enter` of ``owner`` in this thread, even below a later one.

    Raises:
        AutocastStateError: there was none. Nothing was changed.
    """
    thread = _thread
    stack = thread.stack
    at = next((i for i in reversed(range(len(stack))) if stack[i][0] is owner), None)
    if at is None:
        raise AutocastStateError(
            "an autocast region with ops= was left in a thread that had not entered it, or left "
            "twice; enter and leave a region in the same thread (use 'with')"
        )
    _, effective = stack.pop(at)
    try:
        before, thread.active = thread.active, stack[-1][1] if stack else None
        _show(before, thread.active)
    finally:  # after an interrupt too
        effective.kernels.drop()


def _show(before: Effective | None, now: Effective | None) -> None:
    """Write the thread's policy where Dynamo looks: it was ``before``, it is ``now``."""
    old: Marks = before.marks if before is not None else ()
    new: Marks = now.marks if now is not None else ()
    if new is old:
        return
    if not new or not old:
        private.keep_graphs_off_disk(bool(new))
    found = private.marker_devices()
    for device, _ in old:
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, found[device])
    for device, dtype in new:
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, dtype)


private.not_as_frames(__name__)
