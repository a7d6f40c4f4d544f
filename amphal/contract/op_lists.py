"""``OpLists``: a casting policy as a value that can be read, compared and edited."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import ArgumentError, ArgumentTypeError, OpPolicyError, did_you_mean

__all__ = ["POLICIES", "OpDiff", "OpLists", "base_name", "plain_name"]

POLICIES = (
    "lower_precision",
    "fp32",
    "fp32_set_opt_dtype",
    "fp32_append_dtype",
    "promote",
    "banned",
    "as_is",
)
"""Every policy that an op can have, in torch's own words; ``as_is`` is an op that is not listed."""


def plain_name(op: str) -> str:
    """``op`` as these lists spell it: ``"softmax.int"`` for ``"aten::softmax.int"``, and the
    unnamed overload, which torch also calls ``"mm.default"``, as ``"mm"``.
    """
    return op.removeprefix("aten::").removesuffix(".default")


def base_name(op: str) -> str:
    """``"softmax.int"`` without its overload."""
    return op.split(".")[0]


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
        from .op_names import overloads  # asks torch, which this record otherwise does not

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
        from .op_names import expand

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
