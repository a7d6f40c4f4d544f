"""A casting policy never loses what an op writes, also where the schema does not declare it."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch

import amphal
from amphal._torch import private
from amphal.contract import op_names

FLAG = 1
MEAN = 5.0


def _arguments(op: str, first: tuple[int, ...], rest: tuple[int, ...]) -> list[Any]:
    made: list[Any] = []
    for argument in op_names.op_overload(op)._schema.arguments:
        kind = str(argument.type)
        if "List" in kind and "Tensor" in kind:
            made.append([torch.rand(first) + MEAN])
        elif "Tensor" in kind:
            tensors = any(isinstance(value, torch.Tensor) for value in made)
            made.append(torch.rand(rest if tensors else first) + MEAN)
        elif argument.has_default_value():
            made.append(argument.default_value)
        elif "bool" in kind:
            made.append(True)
        elif "float" in kind or "number" in kind:
            made.append(0.5)
        else:
            made.append(FLAG)
    return made


def _written(op: str) -> set[str]:
    """The arguments whose version or value a call changes; batch norms change no version."""
    overload = op_names.op_overload(op)
    names = [a.name for a in overload._schema.arguments]
    found: set[str] = set()
    for first, rest in itertools.product([(3, 3), (2, 3), (2, 3, 4)], [(3, 3), (3,)]):
        arguments = _arguments(op, first, rest)
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        with contextlib.suppress(Exception):
            overload(*arguments)
        found |= {
            name
            for name, argument, old in zip(names, arguments, before, strict=True)
            if isinstance(argument, torch.Tensor)
            and (argument._version or not torch.equal(argument, old))
        }
    return found


# Ops of other libraries' layouts, and those that abort the process on arguments they do not expect.
_NOT_RUN = ("mkldnn", "fbgemm", "quantize", "qlinear", "sparse", "nested", "cudnn", "miopen", "mps")


def test_every_op_that_writes_without_declaring_it_is_known() -> None:
    """Run every public aten op of several tensors: those that write undeclared are in the table."""
    names = {n.removeprefix("aten::") for n in private.all_op_names() if n.startswith("aten::")}
    writers = {}
    for op in sorted(names):
        public = not op.startswith("_") or op in op_names._UPDATE_STATISTICS
        if not public or any(part in op for part in _NOT_RUN) or not op_names.is_defined(op):
            continue
        schema = op_names.op_overload(op)._schema
        if (
            op_names.refusal(op, "fp32")
            or sum("Tensor" in str(a.type) for a in schema.arguments) < 3
        ):
            continue
        written = _written(op)
        if written:
            writers[op] = written
    assert {"batch_norm", "native_batch_norm", "instance_norm", "batch_norm_update_stats"} <= set(
        writers
    )
    assert writers == {op: set(op_names.statistics_of(op)) for op in writers}


@pytest.mark.parametrize("op", ["batch_norm", "native_batch_norm", "_batch_norm_impl_index"])
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [("lower_precision", torch.float32), ("fp32", torch.bfloat16), ("promote", torch.bfloat16)],
)
def test_batch_norm_updates_its_own_statistics(op: str, policy: str, dtype: torch.dtype) -> None:
    """The running mean moves by the momentum 0.5 from 0 towards the mean of the data, 5."""
    module: Any = torch.nn.BatchNorm1d(4, momentum=0.5).to(dtype)
    x = torch.tensor([[MEAN - 1] * 4, [MEAN + 1] * 4])
    with amphal.autocast("cpu", "bf16", ops={op: policy}):
        module(x)
    assert module.running_mean.dtype is dtype
    assert module.running_mean.tolist() == [MEAN / 2] * 4
    assert module.running_var.tolist() == [1.5] * 4


def test_instance_norm_updates_its_own_statistics() -> None:
    """instance_norm reports the update under another flag; the value is right too."""
    module: Any = torch.nn.InstanceNorm1d(4, momentum=0.5, track_running_stats=True)
    x = torch.tensor([MEAN - 1, MEAN + 1]).expand(2, 4, 2)
    with amphal.autocast("cpu", "bf16", ops={"instance_norm": "lower_precision"}):
        module(x)
    assert module.running_mean.tolist() == [MEAN / 2] * 4


def test_evaluation_writes_nothing() -> None:
    """In eval mode the statistics keep their version, so that autograd can use them again."""
    module: Any = torch.nn.BatchNorm1d(4).to(torch.bfloat16).eval()
    with amphal.autocast("cpu", "bf16", ops={"batch_norm": "fp32"}):
        module(torch.ones(2, 4))
    assert module.running_mean._version == 0


def test_gradients_are_those_of_the_plain_call() -> None:
    """The statistics that are written back are no part of the graph."""
    x = torch.randn(8, 4, requires_grad=True)
    module: Any = torch.nn.BatchNorm1d(4)
    module(x).square().sum().backward()
    expected, x.grad = x.grad, None
    with amphal.autocast("cpu", "bf16", ops={"batch_norm": "fp32"}):
        module(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("policy", ["lower_precision", "fp32"])
def test_compiled_batch_norm_updates_its_own_statistics(policy: str) -> None:
    """The update is part of the graph."""
    dtype = torch.float32 if policy == "lower_precision" else torch.bfloat16
    module: Any = torch.nn.BatchNorm1d(4, momentum=0.5).to(dtype)
    x = torch.tensor([[MEAN - 1] * 4, [MEAN + 1] * 4])
    with amphal.autocast("cpu", "bf16", ops={"batch_norm": policy}):
        torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    assert module.running_mean.tolist() == [MEAN / 2] * 4
