"""``OpLists``: a casting policy as a value that can be read, compared and edited."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import ArgumentError, ArgumentTypeError, OpPolicyError, did_you_mean
from .op_names import (
    POLICIES,
    _is_loaded,
    base_name,
    expand,
    is_defined,
    overloads,
    plain_name,
    refusal,
)


class OpDiff(dict[str, tuple[str, str]]):
    """The ops whose policy differs: name to ``(mine, theirs)``. Prints as a table."""

    def __repr__(self) -> str:
        if not self:
            return "OpDiff(no difference)"
        width = max(map(len, self))
        left = max(len(mine) for mine, _ in self.values())
        return "\n".join(f"{op:{width}}  {a:{left}}  {b}" for op, (a, b) in self.items())


@dataclass(frozen=True, repr=False)
class OpLists:
    """Which ops autocast casts, and how: sets of aten names (``"softmax.int"``) by policy.

    The policies are torch's own: ``lower_precision`` casts to the region's dtype, ``fp32`` to
    float32, ``fp32_set_opt_dtype`` and ``fp32_append_dtype`` compute in float32 through a dtype
    argument, ``promote`` takes the widest input dtype, ``banned`` raises. Ops that are in no set
    run in the dtype of their inputs. Names outside aten carry their namespace, as in
    ``"torchvision::nms"``.
    """

    lower_precision: frozenset[str] = frozenset()
    fp32: frozenset[str] = frozenset()
    fp32_set_opt_dtype: frozenset[str] = frozenset()
    fp32_append_dtype: frozenset[str] = frozenset()
    promote: frozenset[str] = frozenset()
    banned: frozenset[str] = frozenset()
    as_is: frozenset[str] = frozenset()
    """Ops on the device's autocast key whose kernel casts nothing."""
    unclassified: frozenset[str] = frozenset()
    """Ops that the live dispatcher casts somehow and no table knows; empty on supported torches."""

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for f in fields(self):
            names = _names(f.name, getattr(self, f.name))
            for name in names:
                if name in seen:
                    raise ArgumentError(
                        f"OpLists: {name!r} is in both {seen[name]} and {f.name}; "
                        "an op has one policy"
                    )
                seen[name] = f.name
            object.__setattr__(self, f.name, names)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """The pairs ``(op, policy)``, sorted by op."""
        pairs = [(op, f.name) for f in fields(self) for op in getattr(self, f.name)]
        return iter(sorted(pairs))

    def __len__(self) -> int:
        return sum(len(getattr(self, f.name)) for f in fields(self))

    def __contains__(self, op: object) -> bool:
        return any(op in getattr(self, f.name) for f in fields(self))

    def __repr__(self) -> str:
        parts = [f"{len(getattr(self, f.name))} {f.name}" for f in fields(self)]
        return f"<OpLists: {', '.join(p for p in parts if not p.startswith('0 '))}>"

    def __str__(self) -> str:
        """Every op, one policy a paragraph."""
        parts = [(f.name, sorted(getattr(self, f.name))) for f in fields(self)]
        return "\n\n".join(f"{name} ({len(ops)}): {' '.join(ops)}" for name, ops in parts if ops)

    def policy(self, op: str) -> str:
        """The policy of ``op``: one of the names of this record's sets, or ``"as_is"``.

        Args:
            op: ``"softmax.int"``, or ``"softmax"`` for all the overloads that are listed.

        Raises:
            OpPolicyError: torch has no such op, or the overloads' policies differ; name one.
        """
        table = dict(self)
        exact = isinstance(op, str) and "." in op
        if exact and plain_name(op) in table:
            return table[plain_name(op)]
        if isinstance(op, str) and not exact:
            op = plain_name(op)
            found = {o: p for o, p in table.items() if base_name(o) == op}
            if len(set(found.values())) > 1:
                raise OpPolicyError(
                    f"the overloads of {op!r} have different policies: "
                    f"{', '.join(f'{o}: {p}' for o, p in found.items())}; name one of them"
                )
            if found:
                return next(iter(found.values()))
        overloads(op)
        return "as_is"

    def diff(self, other: OpLists) -> OpDiff:
        """The ops that ``other`` treats differently, as name to ``(mine, theirs)``."""
        if not isinstance(other, OpLists):
            raise ArgumentTypeError(
                "diff() takes an OpLists, such as amphal.op_lists('cuda'), "
                f"got {type(other).__name__} ({other!r})"
            )
        mine, theirs = dict(self), dict(other)
        pairs = {
            op: (mine.get(op, "as_is"), theirs.get(op, "as_is")) for op in sorted({*mine, *theirs})
        }
        return OpDiff({op: pair for op, pair in pairs.items() if pair[0] != pair[1]})

    def replace(self, ops: Mapping[str, str] | None = None, /, **policies: str) -> OpLists:
        """These lists with other policies for some ops; a bare name means all its overloads.

        ``lists.replace(softmax="lower_precision")``, ``lists.replace({"softmax.int": "as_is"})``.

        Raises:
            OpPolicyError: an unknown op or policy, or a policy that makes no sense for the op.
        """
        table = dict(self)
        for op, policy in expand({**(ops or {}), **policies}).items():
            table.pop(op, None)
            if policy != "as_is":
                table[op] = policy
        return _from_table(table)

    def add(self, **names: Iterable[str]) -> OpLists:
        """These lists and more names in the named sets; for composing tables."""
        for policy in names:
            if policy not in POLICIES:
                raise OpPolicyError(
                    f"OpLists has no set {policy!r}.{did_you_mean(policy, POLICIES)}"
                )
        sets = {f.name: getattr(self, f.name) for f in fields(self)}
        for policy, more in names.items():
            sets[policy] |= _names(policy, more)
        return OpLists(**sets)

    def to_dict(self) -> dict[str, list[str]]:
        """The sets as sorted lists, by policy: plain JSON-able values."""
        return {f.name: sorted(getattr(self, f.name)) for f in fields(self)}


def _names(policy: str, value: Any) -> frozenset[str]:
    if isinstance(value, str):
        raise ArgumentTypeError(
            f"OpLists: {policy} must be a set of op names, got the string {value!r}"
        )
    try:
        names = frozenset(value)
    except TypeError:
        raise ArgumentTypeError(
            f"OpLists: {policy} must be a set of op names, got {type(value).__name__} ({value!r})"
        ) from None
    for name in names:
        if not isinstance(name, str):
            raise ArgumentTypeError(
                f"OpLists: {policy} must be a set of op names, got {type(name).__name__} ({name!r})"
            )
    return frozenset(map(plain_name, names))


def _from_table(table: Mapping[str, str]) -> OpLists:
    sets: dict[str, set[str]] = {f.name: set() for f in fields(OpLists)}
    for op, policy in table.items():
        sets[policy].add(op)
    return OpLists(**{name: frozenset(ops) for name, ops in sets.items()})


def expand_lists(lists: OpLists) -> dict[str, str]:
    """Validated: overload to policy, for all that whole lists name and that is loaded.

    A bare name is the unnamed overload, as in the lists of a device, and where there is none all
    overloads. Names of namespaces that are not loaded are left out.

    Raises:
        OpPolicyError: unclassified ops, an unknown op, or a policy that makes no sense for the op.
    """
    if lists.unclassified:
        raise OpPolicyError(
            f"these op lists don't say what to do with {', '.join(sorted(lists.unclassified))}; "
            "give them policies with .replace(...)"
        )
    table: dict[str, str] = {}
    exact: dict[str, str] = {}
    for op, policy in lists:
        if is_defined(op):
            reason = refusal(op, policy)
            if reason is not None:
                raise OpPolicyError(f"{policy!r} makes no sense for {op!r}: {reason}")
            exact[op] = policy
        elif _is_loaded(op):
            table.update(expand({op: policy}))
    return {**table, **exact}
