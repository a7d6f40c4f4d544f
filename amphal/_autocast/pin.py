"""``amphal.set_precision``: pin modules of a model to a precision, without touching its source."""

from __future__ import annotations

import fnmatch
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .._torch import cast, fields_of, is_record
from ..errors import ArgumentError, ArgumentTypeError, PrecastError, did_you_mean

__all__ = ["STORED_MARK", "set_precision"]

STORED_MARK = "_amphal_stored"
"""The attribute by which ``precast_`` marks a module that holds stored weights."""

Pinned = Literal["fp32", "lower_precision"]
_PRECISIONS = ("fp32", "lower_precision")


def set_precision(
    module: nn.Module,
    precision: Pinned | None,
    *,
    names: str | Iterable[str] | None = None,
    types: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
) -> tuple[str, ...]:
    """Pin modules to a precision inside autocast regions, or undo that.

    In a region, a pinned module's floating-point inputs (float64 aside) are cast to the precision,
    it runs with autocast off and parameters of that precision, and its outputs are cast to the
    region's dtype. Gradients arrive at the parameters in their own dtype. Outside a region, and in
    a module that is pinned itself, a pin does nothing. Parameters beside running statistics (batch
    norms) stay as they are under ``"lower_precision"``, as autocast leaves them.

    A pin is an attribute of the module: it survives ``state_dict``, ``deepcopy``, pickling,
    ``torch.compile`` and ``DistributedDataParallel``. The state dict does not hold it.

    Args:
        module: a module or a whole model.
        precision: ``"fp32"``, ``"lower_precision"`` (the region's dtype), or None to undo.
        names: pin the submodules whose name, as in ``named_modules()``, matches one of these
            patterns (``"encoder.*.norm?"``).
        types: pin the submodules of these types, beside those of ``names``. Without ``names`` and
            ``types``, ``module`` itself is pinned.

    Returns:
        The names of the modules that were pinned or set free; ``""`` is ``module`` itself.

    Raises:
        ArgumentTypeError: an argument of the wrong type.
        ArgumentError: an unknown precision, or no submodule matches. Nothing was changed.
        PrecastError: ``"fp32"`` for parameters that :func:`precast_` stores low.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"set_precision() pins an nn.Module, got {type(module).__name__}")
    if precision is not None and precision not in _PRECISIONS:
        raise ArgumentError(
            f"precision must be 'fp32', 'lower_precision' (the region's dtype) or None (undo), "
            f"got {precision!r}."
            f"{did_you_mean(str(precision), _PRECISIONS)}"
        )
    chosen = _choose(module, names, types)
    if precision == "fp32":
        _refuse_precast(chosen.values())
    for found in chosen.values():
        _release(found)
        if precision is not None:
            _pin(found, precision)
    return tuple(chosen)


def _choose(module: nn.Module, names: Any, types: Any) -> dict[str, nn.Module]:
    if names is None and types is None:
        return {"": module}
    if not isinstance(names, (str, Iterable, type(None))):
        raise ArgumentTypeError(f"names must be a pattern or several, got {names!r}")
    patterns = [names] if isinstance(names, str) else list(names or ())
    if not all(isinstance(p, str) for p in patterns):
        raise ArgumentTypeError(f"names must be patterns, which are strings, got {names!r}")
    kinds = () if types is None else types if isinstance(types, tuple) else (types,)
    if not all(isinstance(t, type) and issubclass(t, nn.Module) for t in kinds):
        raise ArgumentTypeError(f"types must be a module class or a tuple of them, got {types!r}")
    # A module that is shared has several names, each of which finds it.
    modules = dict(module.named_modules(remove_duplicate=False))
    chosen = {
        name: m
        for name, m in modules.items()
        if isinstance(m, kinds) or any(name and fnmatch.fnmatchcase(name, p) for p in patterns)
    }
    if not chosen:
        near = "".join(did_you_mean(p, modules) for p in patterns)
        raise ArgumentError(
            f"no submodule of {type(module).__name__} matches names={names!r}, types={types!r}; "
            f"print(dict(module.named_modules())) shows their names.{near}"
        )
    return chosen


def _refuse_precast(chosen: Iterable[nn.Module]) -> None:
    for pinned in chosen:
        for module in pinned.modules():
            for stored in vars(module).get(STORED_MARK, {}).values():
                raise PrecastError(
                    f"{stored.name} is stored in low precision, so it can't be pinned to fp32: "
                    "call amphal.undo_precast_(model), pin, and precast_ again"
                )


def _pin(module: nn.Module, precision: Pinned) -> None:
    pin = _Pin(module, precision)
    module.forward = pin
    # torch's fused transformer layers take a module's weights past its forward, and stop doing so
    # for a module that has a hook.
    pin.hook = module.register_forward_pre_hook(_mark)


def _release(module: nn.Module) -> None:
    pin = vars(module).get("forward")
    if isinstance(pin, _Pin):
        pin.hook.remove()
        del module.forward
        if pin.bare.forward_before is not None:
            module.forward = pin.bare.forward_before


class _Called(threading.local):
    """The copy of a pinned module that this thread calls now, with the pin that it shares."""

    copy: tuple[_Pin, nn.Module] | None = None


_called = _Called()


def _mark(module: nn.Module, args: Any) -> None:
    """Say which module is called: a shallow copy or a replica shares the original's pin."""
    if torch.compiler.is_compiling():
        return
    pin = vars(module).get("forward")
    is_copy = isinstance(pin, _Pin) and pin.bare.pinned is not module
    _called.copy = (pin, module) if is_copy else None  # type: ignore[assignment]


class _Bare(nn.Module):
    """The pinned module with the forward that it had, for calling it with other parameters."""

    def __init__(self, module: nn.Module, forward_before: Callable[..., Any] | None) -> None:
        super().__init__()
        self.pinned = module
        self.forward_before = forward_before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.forward_before is not None:
            return self.forward_before(*args, **kwargs)
        return type(self.pinned).forward(self.pinned, *args, **kwargs)


class _Pin:
    """A module's ``forward``, in one precision."""

    hook: Any

    def __init__(self, module: nn.Module, precision: Pinned) -> None:
        self.precision = precision
        self.bare = _Bare(module, vars(module).get("forward"))

    @property
    def __signature__(self) -> inspect.Signature:
        before = self.bare.forward_before
        return inspect.signature(before or type(self.bare.pinned).forward.__get__(self.bare.pinned))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bare = self._bare()
        device = _device_type(bare, args, kwargs)
        if device is None or not torch.is_autocast_enabled(device):
            return bare.forward(*args, **kwargs)
        low = torch.get_autocast_dtype(device)
        dtype = torch.float32 if self.precision == "fp32" else low
        args, kwargs = (
            cast(args, (device,), dtype),
            cast(kwargs, (device,), dtype),
        )
        with torch.autocast(device, dtype=low, enabled=False):
            output = self._run(bare, device, dtype, args, kwargs)
        return cast(output, (device,), low)

    def _bare(self) -> _Bare:
        """The module that is called: the pinned one, or a copy of it that shares this pin."""
        if torch.compiler.is_compiling() or _called.copy is None:
            return self.bare
        pin, module = _called.copy
        if pin is not self:
            return self.bare
        _called.copy = None
        return _Bare(module, self.bare.forward_before)

    def _run(self, bare: _Bare, device: str, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
        keep = _beside_statistics(bare) if dtype is not torch.float32 else frozenset()
        chosen = {
            name: p
            for name, p in _weights(bare)
            if name not in keep
            and p.is_floating_point()
            and p.dtype is not dtype
            and p.dtype is not torch.float64
            and p.device.type == device
        }
        if not chosen:
            return bare.forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            # Nothing is swapped where the graph runs.
            others = {name: p.to(dtype) for name, p in chosen.items()}
            return torch.func.functional_call(bare, others, args, kwargs)
        with _CastWeights(chosen.values(), dtype):
            return bare.forward(*args, **kwargs)


class _CastWeights(TorchFunctionMode):
    """Give functions the casts of these weights instead of the weights, in this thread alone.

    The module keeps its weights, so that other threads, a state dict and an error see nothing.
    """

    def __init__(self, weights: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.casts = {id(w): (w, w.to(dtype)) for w in weights}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__set__" or (name.endswith("_") and not name.endswith("__")):
            return func(*args, **(kwargs or {}))  # a write must reach the weight
        args, kwargs = self._cast(args), self._cast(kwargs or {})
        return func(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found = self.casts.get(id(value))
            return value if found is None else found[1]
        if type(value) in (list, tuple):
            return type(value)(self._cast(v) for v in value)
        if type(value) is dict:
            return {k: self._cast(v) for k, v in value.items()}
        return value


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters with their names, also of a replica, whose weights are plain tensors."""
    for prefix, m in module.named_modules():
        replicated = vars(m).get("_former_parameters", {})
        own = {name: getattr(m, name, None) for name in replicated} or m._parameters
        for name, p in own.items():
            if isinstance(p, torch.Tensor):
                yield f"{prefix}.{name}" if prefix else name, p


def _beside_statistics(module: nn.Module) -> frozenset[str]:
    """The parameters that must stay in the dtype of the running statistics beside them.

    Batch norms take an input of low precision, but not weights of another dtype than their
    statistics, which they write to and which therefore can't be cast.
    """
    return frozenset(
        f"{name}.{own}" if name else own
        for name, m in module.named_modules()
        if isinstance(getattr(m, "running_mean", None), torch.Tensor)
        for own, _ in m.named_parameters(recurse=False)
    )


def _device_type(module: nn.Module, args: Any, kwargs: Any) -> str | None:
    """The device type of the first floating-point input, else of the parameters."""
    found = _first((args, kwargs))
    if found is None:
        found = next((p for p in module.parameters() if p.is_floating_point()), None)
    return None if found is None else found.device.type


def _first(values: Any) -> torch.Tensor | None:
    if isinstance(values, torch.Tensor):
        return values if values.is_floating_point() else None
    if isinstance(values, dict):
        values = tuple(values.values())
    elif is_record(values):
        values = tuple(value for _, value in fields_of(values))
    if isinstance(values, (list, tuple)):
        for value in values:
            found = _first(value)
            if found is not None:
                return found
    return None
