"""Names of ops: what torch has, what a bare name means, and which policy makes sense for which op.

A name is ``"softmax.int"`` (an aten overload), ``"softmax"`` (all overloads), or carries another
namespace: ``"torchvision::nms"``. torch's unnamed overload has the bare name, so a bare name in a
list means that overload, and a bare name that a user gives means all.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from .._torch import private
from ..errors import ArgumentTypeError, OpPolicyError, did_you_mean

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


def qualified(op: str) -> str:
    """The dispatcher's name: ``"aten::softmax.int"``."""
    return op if "::" in op else f"aten::{op}"


def is_defined(op: str) -> bool:
    """Whether the running torch, with what is loaded into it, defines exactly this overload."""
    return private.schema_exists(qualified(op))


def op_overload(op: str) -> torch._ops.OpOverload:
    """The callable of an overload that :func:`is_defined`."""
    namespace, _, rest = qualified(op).partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload or "default")  # type: ignore[no-any-return]


def _has_tensors(op: str) -> int:
    """The number of tensor arguments of an overload, a list of tensors counting as two."""
    count = 0
    for argument in op_overload(op)._schema.arguments:
        kind = str(argument.type)
        if "Tensor" in kind:
            count += 2 if "List" in kind or "[]" in kind else 1
    return count


_UPDATE_STATISTICS = frozenset(
    """
    _batch_norm_impl_index batch_norm batch_norm_gather_stats batch_norm_gather_stats_with_counts
    batch_norm_update_stats cudnn_batch_norm instance_norm miopen_batch_norm native_batch_norm
    """.split()
)
WRITES_IF = ("training", "train", "use_input_stats")
"""The flags with which these ops update; those that have none update always."""


def statistics_of(op: str) -> tuple[str, ...]:
    """The arguments that ``op`` writes into although its schema does not declare it.

    Found by running ops and comparing their arguments before and after, which a test repeats.
    """
    return ("running_mean", "running_var") if op in _UPDATE_STATISTICS else ()


_VIEWS_THAT_TORCH_CASTS = frozenset(["view_as_complex"])


def _refusal(op: str, policy: str) -> str | None:
    """Why ``policy`` makes no sense for this overload, or None."""
    schema = op_overload(op)._schema
    if schema.is_mutable:
        return "it writes into its arguments, and a cast would write into a copy"
    views = any(r.alias_info is not None for r in schema.returns)
    if views and op not in _VIEWS_THAT_TORCH_CASTS:
        return "it returns a view of its argument, and a cast would return a view of a copy"
    tensors = _has_tensors(op)
    if tensors == 0:
        return "it takes no tensors"
    if policy == "promote" and tensors < 2:
        return "it takes one tensor, so there is no other to follow"
    if policy == "fp32_set_opt_dtype" and not _takes_dtype(schema):
        return "it has no optional dtype argument"
    if policy == "fp32_append_dtype" and dtype_overload(op) is None:
        return "it has no overload that takes a dtype"
    return None


_DTYPE_OVERLOADS = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",
}


def dtype_overload(op: str) -> str | None:
    """The overload that takes the same arguments and a dtype: what fp32_append_dtype calls."""
    return _DTYPE_OVERLOADS.get(op)


def _takes_dtype(schema: Any) -> bool:
    return any(a.name == "dtype" and a.type.kind() == "OptionalType" for a in schema.arguments)


def _all_names() -> list[str]:
    return [n.removeprefix("aten::") for n in private.all_op_names()]


def overloads(op: str) -> tuple[str, ...]:
    """The overloads that ``op`` names; for a bare name, those that a policy can be given to.

    Raises:
        ArgumentTypeError: not a string.
        OpPolicyError: torch has no such op.
    """
    if not isinstance(op, str):
        raise ArgumentTypeError(
            "an op is named by a string, such as 'softmax' or 'softmax.int', "
            f"got {type(op).__name__} ({op!r})"
        )
    exact, op = "." in op, plain_name(op)
    if exact:
        if is_defined(op):
            return (op,)
    else:
        namespace, _, name = qualified(op).partition("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is not None and hasattr(packet, "overloads"):
            names = [op if o == "default" else f"{op}.{o}" for o in packet.overloads()]
            defined = tuple(n for n in names if is_defined(n))
            if defined:
                return defined
    raise OpPolicyError(_unknown(op))


def _unknown(op: str) -> str:
    names = _all_names()
    bare = {base_name(n) for n in names}
    near = did_you_mean(op, bare if "." not in op else names)
    same = sorted(n for n in names if base_name(n) == base_name(op))
    has = f" {base_name(op)!r} has the overloads {', '.join(same)}." if same else ""
    load = ""
    if not _is_loaded(op):
        namespace = op.partition("::")[0]
        load = f" Nothing of {namespace!r} is loaded: import what defines its ops first."
    return (
        f"torch {torch.__version__} has no op {op!r}.{has}{near}{load} "
        "Ops are named as in torch.ops.aten, such as 'softmax' or 'softmax.int'"
    )


def expand(policies: Mapping[str, str]) -> dict[str, str]:
    """Validated: overload to policy, bare names replaced by their overloads.

    Raises:
        ArgumentTypeError: not a mapping of strings to strings.
        OpPolicyError: an unknown op or policy, or a policy that makes no sense for the op.
    """
    if not isinstance(policies, Mapping):
        raise ArgumentTypeError(
            "ops must be a mapping of op names to policies or an amphal.OpLists "
            "(amphal.op_lists('cuda'), for example), "
            f"got {type(policies).__name__} ({policies!r})"
        )
    table: dict[str, str] = {}
    exact: dict[str, str] = {}
    for op, policy in policies.items():
        if policy not in POLICIES:
            raise OpPolicyError(
                f"{op!r}: there is no policy {policy!r}; a policy is one of 'lower_precision' "
                f"(the region's dtype), 'fp32', 'promote' and 'as_is'."
                f"{did_you_mean(str(policy), POLICIES)}"
            )
        names = overloads(op)
        refusals = {name: _refusal(name, policy) for name in names}
        allowed = [name for name in names if refusals[name] is None]
        if not allowed:
            raise OpPolicyError(
                f"{policy!r} makes no sense for {op!r}: {next(iter(refusals.values()))}"
            )
        (exact if "." in op else table).update(dict.fromkeys(allowed, policy))
    return {**table, **exact}


# An op outside aten can be taken out of its library and be defined anew.
_refusal_in_aten = functools.lru_cache(maxsize=4096)(_refusal)
_CASTING = frozenset(POLICIES) - {"as_is", "banned"}


def refusal(op: str, policy: str) -> str | None:
    """Why ``policy`` makes no sense for this overload, which is defined; None if it makes sense."""
    reason = _refusal if "::" in op else _refusal_in_aten
    return reason(op, policy) if policy in _CASTING else None


def _is_loaded(op: str) -> bool:
    """Whether the namespace of an op that is not defined has other ops, so that it is a typo."""
    namespace = qualified(op).partition("::")[0]
    return any(qualified(n).startswith(f"{namespace}::") for n in _all_names())
