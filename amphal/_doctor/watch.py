"""Run a script and note what it does. Belongs into a process of its own: it patches torch."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode

from .._casting import observed, op_lists
from .._scaler import GradScaler
from .._torch import tensors_in
from .._trace import run_script, user_line
from ..contract import registry
from .findings import Finding
from .source import named_devices

__all__ = ["examine"]

AGAIN = 4
"""A weight that is cast this often without a step in between is worth a note."""


class _Region:
    """A region that is entered now."""

    def __init__(self, device: str, dtype: torch.dtype | None, line: str, on: bool) -> None:
        self.device, self.dtype, self.line, self.on = device, dtype, line, on
        self.ops = self.casts = 0
        self.weights: set[int] = set()


class _Watch:
    """The notes, and the patches that take them."""

    def __init__(self, reference: str | None) -> None:
        self.notes: Counter[tuple[str, str, str]] = Counter()
        self.regions: list[_Region] = []
        self.line_of_fp16 = ""
        self.scaled: set[int] = set()
        """Scalers (by id) that scaled a loss since they were updated."""
        self.unscaled: set[int] = set()
        """Parameters (by id) whose gradients were unscaled since the scaler was updated."""
        self.stepped: dict[tuple[int, int], str] = {}
        """Scaler and optimizer that stepped and were not updated since, with the line."""
        self.inside_scaler = 0
        self.skipped = False
        self.weights: Counter[int] = Counter()
        """In how many regions each weight was cast since the last step of an optimizer."""
        self.banned = dict(op_lists(reference)) if reference else {}
        self.reference = reference

    def note(self, kind: str, detail: str = "", line: str | None = None) -> None:
        self.notes[kind, user_line() if line is None else line, detail] += 1

    # Regions.
    def enter(self, region: Any) -> None:
        dtype = region.fast_dtype if region._enabled else None
        self.regions.append(_Region(region.device, dtype, user_line(), bool(region._enabled)))
        if dtype is torch.float16 and torch.is_grad_enabled():
            self.line_of_fp16 = self.regions[-1].line

    def leave(self) -> None:
        if not self.regions:
            return
        left = self.regions.pop()
        if not self.regions:
            self.weights.update(left.weights)
        if not left.on or any(r.on and r.device == left.device for r in self.regions):
            return
        if left.ops == 0:
            self.note("region-of-another-device", left.device, left.line)
        elif left.casts == 0:
            self.note("region-casts-nothing", "", left.line)

    def listed(self, op: str, policy: str, run: Callable[[], Any], values: Any) -> Any:
        tensors = [t for t in tensors_in(values) if t.is_floating_point()]
        region = self.regions[-1] if self.regions else None
        if region is not None:
            low = torch.get_autocast_dtype(region.device)
            wanted = torch.float32 if policy.startswith("fp32") else low
            casts = [
                t for t in tensors if policy not in ("pass_by", "as_is") and t.dtype is not wanted
            ]
            for each in self.regions:
                each.casts += len(casts)
            for t in casts:
                if isinstance(t, torch.nn.Parameter):
                    self.regions[0].weights.add(id(t))
            if self.banned.get(op) == "banned":
                self.note("banned-elsewhere", f"{op}, on {self.reference}")
        return run()

    def weights_changed(self) -> None:
        """An optimizer steps, or the script ends."""
        again = sum(n >= AGAIN for n in self.weights.values())
        if again:
            most = max(self.weights.values())
            self.note("weights-cast-again", f"{again} weights, up to {most} times", "")
        self.weights.clear()

    def ran(self, device: str) -> None:
        for region in self.regions:
            region.ops += region.device == device


def _short(line: str) -> str:
    return Path(line).name


def _skipped(scaler: Any, optimizer: Any) -> bool:
    if isinstance(scaler, GradScaler):
        return bool(scaler.outcome(optimizer).skipped)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(flag) for flag in found.values())


def _fp16_parameters(watch: _Watch, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.dtype is torch.float16:
                watch.note("fp16-parameters", type(optimizer).__name__)
                return


def _subclasses(kind: type) -> list[type]:
    found = [kind]
    below: list[type] = kind.__subclasses__()
    for sub in below:
        found += _subclasses(sub)
    return found


class _Devices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts for each region the ops that ran on its device."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.watch.regions:
            for t in tensors_in(result):
                self.watch.ran(t.device.type)
                break
        return result


def _patched(owner: Any, name: str, make: Callable[[Any], Any]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    before = owner.__dict__.get(name) if isinstance(owner, type) else getattr(owner, name)
    if before is None:
        return stack
    setattr(owner, name, make(before))
    stack.callback(setattr, owner, name, before)
    return stack


@contextlib.contextmanager
def _watching(watch: _Watch, devices: tuple[str, ...]) -> Iterator[None]:
    def enter(original: Any) -> Any:
        @functools.wraps(original)
        def __enter__(self: Any) -> Any:
            result = original(self)
            watch.enter(self)
            return result

        return __enter__

    def leave(original: Any) -> Any:
        @functools.wraps(original)
        def __exit__(self: Any, *args: Any) -> Any:
            watch.leave()
            return original(self, *args)

        return __exit__

    def backward(original: Any) -> Any:
        @functools.wraps(original)
        def run(first: Any, *args: Any, **kwargs: Any) -> Any:
            if any(r.on for r in watch.regions):
                watch.note("backward-under-autocast")
            if watch.line_of_fp16 and not watch.scaled:
                watch.note("fp16-without-scaler", f"the region of {_short(watch.line_of_fp16)}")
            watch.line_of_fp16 = ""
            return original(first, *args, **kwargs)

        return run

    def scale(original: Any) -> Any:
        @functools.wraps(original)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if self.is_enabled():
                watch.scaled.add(id(self))
            return result

        return run

    def unscale(original: Any) -> Any:
        @functools.wraps(original)
        def run(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            _fp16_parameters(watch, optimizer)
            result = original(self, optimizer, *args, **kwargs)
            watch.unscaled.update(id(p) for g in optimizer.param_groups for p in g["params"])
            return result

        return run

    def step(original: Any) -> Any:
        @functools.wraps(original)
        def run(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_enabled():
                return original(self, optimizer, *args, **kwargs)
            _fp16_parameters(watch, optimizer)
            line, pair = user_line(), (id(self), id(optimizer))
            if pair in watch.stepped:
                watch.note("missing-update", "", line)
            watch.inside_scaler += 1
            try:
                result = original(self, optimizer, *args, **kwargs)
            finally:
                watch.inside_scaler -= 1
            watch.stepped[pair] = line
            watch.skipped = _skipped(self, optimizer)
            return result

        return run

    def update(original: Any) -> Any:
        @functools.wraps(original)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            for held in (watch.scaled, watch.unscaled):
                held.clear()
            for pair in [p for p in watch.stepped if p[0] == id(self)]:
                del watch.stepped[pair]
            return original(self, *args, **kwargs)

        return run

    def clip(original: Any) -> Any:
        @functools.wraps(original)
        def run(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            scaled = bool(watch.scaled) and not watch.inside_scaler
            if scaled and not all(id(p) in watch.unscaled for p in given):
                watch.note("clip-before-unscale")
            return original(given, *args, **kwargs)

        return run

    def schedule(original: Any) -> Any:
        @functools.wraps(original)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Its first step is made by its constructor.
            if watch.skipped and self.last_epoch >= 0:
                watch.note("schedule-on-skipped-step", type(self).__name__)
            return original(self, *args, **kwargs)

        return run

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watch.weights_changed()
        if not watch.inside_scaler:
            watch.skipped = False
            held = {id(p) for g in optimizer.param_groups for p in g["params"]}
            if watch.scaled and not held & watch.unscaled:
                watch.note("step-past-the-scaler", type(optimizer).__name__)

    import torch.nn.utils.clip_grad as clipping
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    with contextlib.ExitStack() as undo:
        for kind in _subclasses(torch.autocast):
            undo.enter_context(_patched(kind, "__enter__", enter))
            undo.enter_context(_patched(kind, "__exit__", leave))
        for kind in _subclasses(torch.amp.GradScaler):
            for name, make in (
                ("scale", scale),
                ("unscale_", unscale),
                ("step", step),
                ("update", update),
            ):
                undo.enter_context(_patched(kind, name, make))
        undo.enter_context(_patched(torch.autograd, "backward", backward))
        for kind in _subclasses(LRScheduler):
            undo.enter_context(_patched(kind, "step", schedule))
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            for module in (torch.nn.utils, clipping):
                undo.enter_context(_patched(module, name, clip))
        undo.callback(register_optimizer_step_pre_hook(before_step).remove)
        banned = frozenset(op for op, policy in watch.banned.items() if policy == "banned")
        undo.enter_context(observed(watch.listed, banned, devices))
        undo.enter_context(_Devices(watch))
        yield


def examine(
    script: Path, arguments: list[str], *, compare: str | None = None
) -> tuple[list[Finding], BaseException | None]:
    """Run a script as ``python script arguments`` does, and say what is wrong with it.

    Args:
        script: a Python file.
        arguments: its ``sys.argv[1:]``.
        compare: a device type whose banned ops are looked for; None: the backend of highest
            priority.

    Returns:
        The findings, wrong numbers first; and what ended the script before its end, or None.
    """
    backends = registry.registered_backends()
    kinds = [row.name for row in backends.values()]
    rows = [row for row in backends.values() if row.backend is not None]
    if compare is None:
        compare = max(rows, key=_priority).name
    watch = _Watch(compare)
    present = tuple(
        row.name for row in backends.values() if row.backend and registry.availability(row.backend)
    )
    ended: BaseException | None = None
    with _watching(watch, present):
        try:
            run_script(script, arguments)
        except SystemExit as exit_:
            ended = exit_ if exit_.code not in (None, 0) else None
        except Exception as error:
            ended = error
        watch.weights_changed()
    for line in watch.stepped.values():
        watch.notes["missing-update", line, ""] += 1
    found = [Finding(kind, line, detail, n) for (kind, line, detail), n in watch.notes.items()]
    found += named_devices(script, kinds, min(rows, key=_priority).name)
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(_merged(found), key=lambda f: (order[f.level], f.line, f.kind)), ended


def _priority(row: Any) -> int:
    return int(row.backend.priority)


def _merged(found: list[Finding]) -> list[Finding]:
    """One finding for each kind and line."""
    first: dict[tuple[str, str], Finding] = {}
    for f in found:
        key = f.kind, f.line
        if key in first:
            f = Finding(f.kind, f.line, first[key].detail or f.detail, first[key].count + f.count)
        first[key] = f
    return list(first.values())
