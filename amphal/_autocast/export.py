"""A region with its own policy under ``torch.export``: its casts become ops of the graph.

Export records ops before autocast sees them, and an exported program runs where amphal's kernels
are not. So a region sends each function on past the recorder, lets autocast and the policy's
kernels do their work, and hands what comes out of them to the recorder: the ops, and the casts
before them. What is recorded runs with autocast off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .._casting import PASS_BY
from .._casting import policy as policies
from .._torch import private
from ..errors import OpPolicyError

__all__ = ["Bake"]


class Bake(TorchFunctionMode):
    """While it is on, functions are recorded with the casts of a region and the policy in force."""

    def __init__(self, region: Any, innermost: Any) -> None:
        super().__init__()
        self.region = region
        self._innermost = innermost
        self._busy = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inner = self._innermost()
        if inner is not self.region:
            if (
                inner.device == self.region.device
                and inner._enabled
                and not hasattr(inner, "policy")
            ):
                raise OpPolicyError(
                    "torch.export can't keep a casting policy in a region without ops= that is "
                    "inside one with it; give the inner region ops={} or enabled=False"
                )
            # The inner region records for itself, or has autocast off.
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.HigherOrderOperator):
            return self._record(func, args, kwargs)
        return func(*args, **kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        region = self.region
        outer = private.dispatch_state()
        dtype = torch.get_autocast_dtype(region.device)
        torch.set_autocast_enabled(region.device, True)
        torch.set_autocast_dtype(region.device, region.fast_dtype)
        try:
            with private.past_the_recorder():
                with _Forward(outer, private.dispatch_state(), _cast_ops(region)):
                    return func(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(region.device, False)
            torch.set_autocast_dtype(region.device, dtype)


def _cast_ops(region: Any) -> frozenset[str]:
    """The ops that have a cast kernel in this region."""
    policy = region.policy
    effective = policies.active()
    table = {**policy.builtin, **(effective.tables.get(policy.key, {}) if effective else {})}
    return frozenset(op for op, p in table.items() if p != PASS_BY)


class _Forward(TorchDispatchMode):
    """Hands ops that have been through autocast to the recorder."""

    def __init__(self, outer: Any, inner: Any, cast: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outer, self._inner, self._cast = outer, inner, cast

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op.namespace == "prim":
            return op(*args, **kwargs)
        name = op.name().removeprefix("aten::")
        if name not in self._cast and private.is_composite(op):
            # What it is made of may be cast.
            with private.in_dispatch_state(self._inner), self:
                return op.decompose(*args, **kwargs)
        with private.in_dispatch_state(self._outer):
            return op(*args, **kwargs)
