"""``amphal.find_nonfinite()``: the op that makes the first NaN or infinity of a step."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .._autocast import set_precision
from .._casting import policy as policies
from .._choice import choose
from .._torch import tensors_in
from ..contract import short_name
from ..errors import AmphalError, ArgumentTypeError
from .recorder import LIBRARY, Call, Recorder
from .rows import Rows, Values

__all__ = ["NonFinite", "find_nonfinite"]


@dataclass(frozen=True)
class NonFinite:
    """Where the first NaN or infinity of a step comes from."""

    kind: str
    """``"inf"`` or ``"nan"``."""
    phase: str
    """``"forward"`` or ``"backward"``."""
    op: str
    """The listed op, or the aten op that ran."""
    aten: str
    """The aten op whose output is the first that is not finite."""
    module: str
    """The path of the innermost module, from the class of the outermost; empty outside of one."""
    line: str
    """``file:line`` in the user's code; of the forward pass for an op of the backward pass."""
    dtype: str
    """The dtype of the bad output."""
    inputs: tuple[dict[str, Any], ...]
    """Dtype, shape and range of each floating-point input."""
    frames: tuple[str, ...]
    """The user's frames around the op, innermost last."""
    cures: tuple[str, ...] = field(default=())
    """Lines of code after which the step is finite here. Each was run."""
    tried: tuple[str, ...] = field(default=())
    """Lines that were run and did not cure it."""

    def __str__(self) -> str:
        where = self.module or "no module"
        finite = not any(i["infinite"] or i["nan"] for i in self.inputs)
        ranges = "; ".join(
            f"{i['dtype']}{tuple(i['shape'])} up to {i['largest']:.4g}" for i in self.inputs
        )
        text = (
            f"the first {self.kind} comes from {self.op} ({self.phase}, {self.dtype}) in {where}, "
            f"{self.line}\n  inputs{', all finite' if finite else ''}: {ranges or 'none'}"
        )
        if self.op != self.aten:
            text += f"\n  inside {self.op} it is aten::{self.aten}"
        for cure in self.cures:
            text += f"\n  cure (run, and finite): {cure}"
        if not self.cures and self.tried:
            text += "\n  none of these cures it: " + "; ".join(self.tried)
        return text


class _Found(BaseException):
    """Leaves the step; no ``except Exception`` of the step stops it."""

    def __init__(self, finding: NonFinite) -> None:
        super().__init__()
        self.finding = finding


# Ops that write values which the caller names. An infinity from them is a mask, and is meant.
_GIVEN = frozenset(
    (
        "fill fill_ full full_like new_full masked_fill masked_fill_ where scalar_tensor "
        "lift_fresh copy_ _to_copy clone zero_ zeros zeros_like ones ones_like select_scatter "
        "slice_scatter index_fill index_fill_ constant_pad_nd cat stack triu tril masked_scatter "
        "index_put index_put_ _unsafe_index_put expand repeat index gather index_select maximum "
        "minimum"
    ).split()
)


def _has(values: Any, test: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    return any(
        bool(test(t.detach()).any())
        for t in tensors_in(values)
        if t.is_floating_point() and t.numel() and t.device.type != "meta" and not t.is_sparse
    )


def _watch(call: Call, func: Any, inputs: Any, result: Any) -> None:
    name = func._schema.name.rpartition("::")[2]
    # A cast makes an infinity of a finite value that is too large; other copies do not.
    makes = name not in _GIVEN or name == "_to_copy"
    if _has(result, torch.isnan) and not _has(inputs, torch.isnan):
        kind = "nan"
    elif makes and _has(result, torch.isinf) and not _has(inputs, torch.isinf):
        kind = "inf"
    else:
        return
    described = []
    for t in tensors_in(inputs):
        if t.is_floating_point():
            seen = Values()
            seen.add(t)
            described.append(
                {"dtype": short_name(t.dtype), "shape": list(t.shape), **seen.to_dict()}
            )
    bad = next(t for t in tensors_in(result) if t.is_floating_point())
    frames = tuple(
        f"{f.filename}:{f.lineno} {f.name}: {f.line}"
        for f in traceback.extract_stack()
        if not f.filename.startswith(LIBRARY)
    )
    raise _Found(
        NonFinite(
            kind=kind,
            phase=call.phase,
            op=call.op,
            aten=name,
            module=call.module,
            line=call.line,
            dtype=short_name(bad.dtype),
            inputs=tuple(described),
            frames=frames[-8:],
        )
    )


def find_nonfinite(
    step: Callable[[], Any], model: torch.nn.Module | None = None
) -> NonFinite | None:
    """Run ``step`` and stop at the first op with finite inputs and an output that is not finite.

    Forward and backward. Infinities that the step writes itself (a mask of ``-inf``) are not
    findings. With ``model``, lines that may cure it are tried: pinning the module to fp32, the op
    in fp32, the step in bf16; the ones after which the step is finite are in the finding.
    The parameters, gradients, buffers and random state of the model are put back after each run.

    Args:
        step: forward, loss and backward of one iteration, with its regions. Not the optimizer's
            step, which would change the weights.
        model: the module that the step runs, to try cures on.

    Returns:
        What was found; None if every value of the step was finite.

    Raises:
        ArgumentTypeError: ``step`` is not callable, or ``model`` not a module.
    """
    if not callable(step):
        raise ArgumentTypeError(f"step must be a function without arguments, got {step!r}")
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model must be a torch.nn.Module or None, got {model!r}")
    finding = _first(step, model)
    if finding is None or model is None:
        return finding
    cures: list[str] = []
    tried: list[str] = []
    for line, apply in _candidates(finding, model):
        try:
            with apply():
                cured = _first(step, model) is None
        except AmphalError:
            cured = False
        (cures if cured else tried).append(line)
    fields = {**vars(finding), "cures": tuple(cures), "tried": tuple(tried)}
    return NonFinite(**fields)


def _first(step: Callable[[], Any], model: torch.nn.Module | None) -> NonFinite | None:
    recorder = Recorder(Rows(), False, _watch)
    devices = (choose.detect().device.type,)
    with _put_back(model):
        try:
            with recorder.recording(frozenset(), devices):
                step()
        except _Found as found:
            return found.finding
    return None


@contextlib.contextmanager
def _put_back(model: torch.nn.Module | None) -> Iterator[None]:
    """The values and gradients of a model, and torch's random state, as they were."""
    random = torch.get_rng_state()
    if model is None:
        try:
            yield
        finally:
            torch.set_rng_state(random)
        return
    tensors = [*model.parameters(), *model.buffers()]
    values = [t.detach().clone() for t in tensors]
    gradients = [None if t.grad is None else t.grad.detach().clone() for t in tensors]
    try:
        yield
    finally:
        torch.set_rng_state(random)
        with torch.no_grad():
            for t, value, gradient in zip(tensors, values, gradients, strict=True):
                t.copy_(value)
                t.grad = gradient
        # A step that was left in the middle leaves casts of its regions behind.
        torch.clear_autocast_cache()


_Apply = Callable[[], contextlib.AbstractContextManager[Any]]


def _candidates(finding: NonFinite, model: torch.nn.Module) -> Iterator[tuple[str, _Apply]]:
    """Lines that may cure it, the narrowest first."""
    root, _, path = finding.module.partition(".")
    if root == type(model).__name__ and path in dict(model.named_modules()):
        for name in filter(None, (path, path.rpartition(".")[0])):
            yield (
                f'amphal.set_precision(model, "fp32", names="{name}")',
                functools.partial(_pinned, model, name),
            )
    if finding.phase == "forward":
        yield (
            f'amphal.autocast(ops={{"{finding.op}": "fp32"}})',
            lambda: _with_policy(finding.op),
        )


@contextlib.contextmanager
def _pinned(model: torch.nn.Module, name: str) -> Iterator[None]:
    set_precision(model, "fp32", names=name)
    try:
        yield
    finally:
        set_precision(model, None, names=name)


@contextlib.contextmanager
def _with_policy(op: str) -> Iterator[None]:
    """The policy in force in this thread, whichever regions the step enters."""
    device = choose.detect().device.type
    made = policies.policy(device, torch.get_autocast_dtype(device), {op: "fp32"})
    owner = object()
    policies.enter(owner, made)
    try:
        yield
    finally:
        policies.leave(owner)
