"""Calls of common ops, by aten name, to see what autocast casts their inputs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["CALLS", "expected_dtype"]

Make = Callable[..., torch.Tensor]
aten = torch.ops.aten


def _pair(op: Any) -> Callable[[Make], Any]:
    return lambda t: op(t(4, 4), t(4, 4, other=True))


# make(*shape) gives a tensor of the dtype in question; make(..., other=True) one of the second
# dtype, so that a promotion shows.
CALLS: Mapping[str, Callable[[Make], Any]] = {
    "mm": _pair(aten.mm.default),
    "matmul": _pair(aten.matmul.default),
    "linear": lambda t: aten.linear.default(t(4, 4), t(4, 4), t(4)),
    "addmm": lambda t: aten.addmm.default(t(4), t(4, 4), t(4, 4)),
    "mv": lambda t: aten.mv.default(t(4, 4), t(4)),
    "bmm": lambda t: aten.bmm.default(t(2, 4, 4), t(2, 4, 4)),
    "baddbmm": lambda t: aten.baddbmm.default(t(2, 4, 4), t(2, 4, 4), t(2, 4, 4)),
    "conv1d": lambda t: aten.conv1d.default(t(1, 2, 5), t(3, 2, 3)),
    "conv2d": lambda t: aten.conv2d.default(t(1, 2, 5, 5), t(3, 2, 3, 3)),
    "prelu": lambda t: aten.prelu.default(t(4, 4), t(1)),
    "exp": lambda t: aten.exp.default(t(4, 4)),
    "log": lambda t: aten.log.default(t(4, 4)),
    "rsqrt": lambda t: aten.rsqrt.default(t(4, 4)),
    "pow.Tensor_Scalar": lambda t: aten.pow.Tensor_Scalar(t(4, 4), 2),
    "softplus": lambda t: aten.softplus.default(t(4, 4)),
    "layer_norm": lambda t: aten.layer_norm.default(t(4, 4), [4], t(4), t(4)),
    "group_norm": lambda t: aten.group_norm.default(t(2, 4, 3), 2, t(4), t(4)),
    "mse_loss": lambda t: aten.mse_loss.default(t(4, 4), t(4, 4)),
    "l1_loss": lambda t: aten.l1_loss.default(t(4, 4), t(4, 4)),
    "binary_cross_entropy_with_logits": lambda t: aten.binary_cross_entropy_with_logits.default(
        t(4, 4), t(4, 4)
    ),
    "softmax.int": lambda t: aten.softmax.int(t(4, 4), -1),
    "log_softmax.int": lambda t: aten.log_softmax.int(t(4, 4), -1),
    "sum": lambda t: aten.sum.default(t(4, 4)),
    "sum.dim_IntList": lambda t: aten.sum.dim_IntList(t(4, 4), [1]),
    "prod": lambda t: aten.prod.default(t(4, 4)),
    "cumsum": lambda t: aten.cumsum.default(t(4, 4), 0),
    "addcmul": lambda t: aten.addcmul.default(t(4, 4), t(4, 4), t(4, 4, other=True)),
    "cat": lambda t: aten.cat.default([t(4, 4), t(4, 4, other=True)]),
    "stack": lambda t: aten.stack.default([t(4, 4), t(4, 4, other=True)]),
    "dot": lambda t: aten.dot.default(t(4), t(4, other=True)),
    "relu": lambda t: aten.relu.default(t(4, 4)),
    "gelu": lambda t: aten.gelu.default(t(4, 4)),
    "tanh": lambda t: aten.tanh.default(t(4, 4)),
    "sigmoid": lambda t: aten.sigmoid.default(t(4, 4)),
    "mean": lambda t: aten.mean.default(t(4, 4)),
    "mul.Tensor": lambda t: aten.mul.Tensor(t(4, 4), t(4, 4)),
}


def expected_dtype(policy: str | None, given: torch.dtype, low: torch.dtype) -> torch.dtype:
    """The dtype that an op with this policy computes in (no policy: that of its inputs)."""
    if policy == "lower_precision":
        return low
    if policy in ("fp32", "fp32_set_opt_dtype", "fp32_append_dtype"):
        return torch.float32
    return given
