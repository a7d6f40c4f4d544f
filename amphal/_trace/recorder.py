"""The recorder: every op of this thread, below autograd and below autocast.

Two views are joined. A dispatch mode sees each op that runs, the casts (``aten._to_copy``) among
them, forward and backward. An observer on the autocast keys (``_casting.observe``) sees each call
of a listed op before it is cast, so a cast is counted for the op that needs it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._casting import observed
from .._torch import private, tensors_in
from ..contract import short_name
from .rows import Rows, Values

__all__ = ["LIBRARY", "Call", "Recorder"]

_TO_COPY = torch.ops.aten._to_copy.default
LIBRARY = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent.parent),
    "<frozen",
    "<string>",
)
"""Where frames are that are not the user's: torch, amphal, and code without a file."""

_in_library: dict[Any, bool] = {}
_SEQUENCES = 200_000
"""How many autograd nodes are remembered, to say which forward op a backward op belongs to."""


def _floating(value: Any) -> list[torch.Tensor]:
    return [t for t in tensors_in(value) if t.is_floating_point()]


def user_line() -> str:
    """``file:line`` of the innermost frame outside torch and amphal."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        inside = _in_library.get(code)
        if inside is None:
            if len(_in_library) > 50_000:
                _in_library.clear()
            inside = _in_library[code] = code.co_filename.startswith(LIBRARY)
        if not inside:
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Call:
    """One call of an op: where it is, what goes in, what comes out."""

    __slots__ = ("cast_bytes", "casts", "inputs", "line", "module", "op", "phase", "policy")

    def __init__(
        self, phase: str, op: str, policy: str, module: str, line: str, inputs: tuple[str, ...]
    ) -> None:
        self.phase, self.op, self.policy = phase, op, policy
        self.module, self.line, self.inputs = module, line, inputs
        self.casts = self.cast_bytes = 0


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Entered, it fills ``rows`` and tells ``watch`` of every op with its inputs and outputs."""

    def __init__(
        self, rows: Rows, values: bool, watch: Callable[[Call, Any, Any, Any], None] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.values, self.watch = rows, values, watch
        self.calls: list[Call] = []
        self.modules: list[tuple[torch.nn.Module, str, dict[int, str]]] = []
        self._names: dict[int, str] = {}
        self._forward: dict[int, tuple[str, str]] = {}
        self._reading = False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Ops in this block are the recorder's own, and are not recorded."""
        before, self._reading = self._reading, True
        try:
            yield
        finally:
            self._reading = before

    @contextlib.contextmanager
    def recording(self, ops: frozenset[str], devices: tuple[str, ...]) -> Iterator[None]:
        """Record until the block ends; listed ops of these devices are seen before their casts."""
        hooks = torch.nn.modules.module
        with contextlib.ExitStack() as undo:
            for handle in (
                hooks.register_module_forward_pre_hook(self._enter_module),
                hooks.register_module_forward_hook(self._leave_module, always_call=True),
            ):
                undo.callback(handle.remove)
            undo.enter_context(observed(self._listed, ops, devices))
            undo.enter_context(self)
            yield

    # Modules: the outermost is called by its class, those inside by their path in it.
    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if self.modules:
            _, _, names = self.modules[-1]
            path = names.get(id(module))
            root = self.modules[0][1]
            full = f"{root}.{path}" if path else f"{root}/{type(module).__name__}"
        else:
            names = {id(m): name for name, m in module.named_modules() if name}
            full = type(module).__name__
            for name, parameter in module.named_parameters(remove_duplicate=False):
                self._names.setdefault(id(parameter), f"{full}.{name}")
        self.modules.append((module, full, names))

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        for i in reversed(range(len(self.modules))):
            if self.modules[i][0] is module:
                del self.modules[i:]
                return

    def _place(self) -> tuple[str, str, str]:
        node = private.current_autograd_node()
        if node is None:
            return "forward", self.modules[-1][1] if self.modules else "", user_line()
        module, line = self._forward.get(private.sequence_of(node), ("", ""))
        return "backward", module, line or user_line()

    def _listed(self, op: str, policy: str, run: Callable[[], Any], values: Any) -> Any:
        """A listed op, before autocast casts its inputs."""
        phase, module, line = self._place()
        inputs = tuple(short_name(t.dtype) for t in _floating(values))
        call = Call(phase, op, policy, module, line, inputs)
        self.calls.append(call)
        try:
            result = run()
        finally:
            self.calls.pop()
        self._finish(call, result)
        return result

    def _finish(self, call: Call, result: Any) -> None:
        outputs = _floating(result)
        row = self.rows.of(call, tuple(short_name(t.dtype) for t in outputs))
        row.count += 1
        row.casts += call.casts
        row.cast_bytes += call.cast_bytes
        if self.values and outputs:
            row.values = row.values or Values()
            with self.reading():
                for t in outputs:
                    row.values.add(t)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._reading:
            return result
        node = private.current_autograd_node()
        if node is None:
            self._remember()
        if func is _TO_COPY and (cast := self._cast(args[0], result)) is not None:
            if self.watch is not None:
                with self.reading():
                    self.watch(cast, func, (args, kwargs), result)
            return result
        floating = _floating(result)
        if not floating and not _floating((args, kwargs)):
            return result
        inner = bool(self.calls) and node is None
        if inner:
            call = self.calls[-1]
        elif _computes(func):
            phase, module, line = self._place()
            inputs = tuple(short_name(t.dtype) for t in _floating((args, kwargs)))
            call = Call(phase, func._schema.name.removeprefix("aten::"), "", module, line, inputs)
            self._finish(call, result)
        else:
            return result
        if self.watch is not None and _computes(func):
            with self.reading():
                self.watch(call, func, (args, kwargs), result)
        return result

    def _remember(self) -> None:
        # The node of this op, if it gets one, is the last that was numbered.
        if len(self._forward) >= _SEQUENCES:
            self._forward.clear()
        module = self.modules[-1][1] if self.modules else ""
        self._forward[private.next_sequence_number() - 1] = (module, user_line())

    def _cast(self, source: torch.Tensor, result: torch.Tensor) -> Call | None:
        """Count a change of floating-point dtype for its call; None for any other copy."""
        if source.dtype is result.dtype or not source.is_floating_point():
            return None
        if not result.is_floating_point():
            return None
        size = result.numel() * result.element_size()
        weight = self._names.get(id(source))
        self.rows.count_cast(size, weight, result.dtype)
        if self.calls and private.current_autograd_node() is None:
            call = self.calls[-1]
            call.casts += 1
            call.cast_bytes += size
        else:
            phase, module, line = self._place()
            inputs = (short_name(source.dtype),)
            op = "cast in the script" if phase == "forward" else "cast of a gradient"
            call = Call(phase, op, "", module, line, inputs)
            call.casts, call.cast_bytes = 1, size
            self._finish(call, result)
        if self.values:
            with self.reading():
                flushed = int(((source != 0) & (result == 0)).sum())
            self.rows.flushed(call, flushed, result.numel())
        return call


_SKIPPED = frozenset(
    (
        "detach alias empty empty_like new_empty empty_strided empty_permuted _local_scalar_dense "
        "is_pinned _pin_memory resize_ set_ record_stream"
    ).split()
)


def _computes(func: Any) -> bool:
    """Whether an op computes values: views, and memory that nobody has written, are none."""
    name = func._schema.name.rpartition("::")[2]
    return name not in _SKIPPED and not getattr(func, "is_view", False)
