"""What consumes a parameter: found by watching a run, or told from torch's own modules.

Watching happens below autocast: the ops that arrive there have had their casts, which are ops of
their own. A parameter can be stored in the low precision when every op that reads it, directly or
through a view, is the cast that autocast makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch import private, tensors_in
from .torch_modules import FUSED_LAYER_CASTS

__all__ = ["Conversions", "Reads", "Weight", "unfit", "weights_of"]


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter with every name that it has in the model, and where each is."""

    param: nn.Parameter
    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


def weights_of(model: nn.Module) -> list[Weight]:
    """The floating-point parameters of a model, each once, in the order of their names."""
    found: dict[int, tuple[nn.Parameter, dict[str, None], dict[tuple[int, str], Any]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for local, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if nn.parameter.is_lazy(param) or not param.is_floating_point():
                continue
            _, names, places = found.setdefault(id(param), (param, {}, {}))
            names[f"{prefix}.{local}" if prefix else local] = None
            places[id(module), local] = (module, local)
    return [Weight(p, tuple(names), tuple(places.values())) for p, names, places in found.values()]


def _address(tensor: torch.Tensor) -> int:
    """Which storage a tensor lies in; 0 where it has none of its own."""
    if tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass without storage
        return 0


def unfit(model: nn.Module, device_type: str, low: torch.dtype) -> dict[int, str]:
    """Why a frozen parameter can't be stored in another dtype whatever reads it, by its ``id``."""
    weights = weights_of(model)
    holders: dict[int, set[int]] = {}
    for tensor in (*(w.param for w in weights), *model.buffers(), *_attributes(model)):
        holders.setdefault(_address(tensor), set()).add(id(tensor))
    found = {}
    for weight in weights:
        reason = _unfit(weight, device_type, low, holders)
        if reason is not None:
            found[id(weight.param)] = reason
    return found


def _attributes(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that a module has besides its parameters and buffers, such as views of them."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers"):
                yield from tensors_in(list(value.values()) if isinstance(value, dict) else value)


def _unfit(
    weight: Weight, device_type: str, low: torch.dtype, holders: Mapping[int, set[int]]
) -> str | None:
    param = weight.param
    if param.dtype is low:
        return f"it is {_word(low)} already"
    if param.dtype is not torch.float32:
        return f"it is {_word(param.dtype)}, and only float32 is stored lower"
    if param.device.type != device_type:
        return f"it is on {param.device}, and the plan is for {device_type}"
    if type(param) is not nn.Parameter or param.layout is not torch.strided:
        return f"it is a {type(param).__name__} ({param.layout}), no plain parameter"
    if param.is_inference():
        return "it was made in inference mode, which lets nothing replace its values"
    if param.grad is not None:
        return "it has a gradient; set .grad to None first"
    if param.numel() == 0:
        return "it is empty"
    if len(holders[_address(param)]) > 1:
        return "it shares its storage with another parameter, buffer or attribute"
    if any(isinstance(module, torch.jit.ScriptModule) for module, _ in weight.places):
        return "it belongs to a ScriptModule"
    return None


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each op that reads one of these parameters: ``casts``, and the ``others``."""

    def __init__(self, weights: list[Weight], low: torch.dtype, lowered: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._at = {_address(w.param): w.name for w in weights}
        self._low, self._lowered = low, lowered
        self.converting = False
        """Set by :class:`Conversions` while code of the model converts a tensor."""
        self.casts: set[str] = set()
        self.others: dict[str, str] = {}

    def __enter__(self) -> Reads:
        self._state = private.dispatch_state()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::")
        fused = FUSED_LAYER_CASTS.get(name)
        if fused is not None:
            # The ops in its kernel are cast, which they are not below a mode.
            with private.in_dispatch_state(self._state):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        arguments = func._schema.arguments
        given = [*zip(arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in arguments if a.name in kwargs]
        outputs = {_address(t) for t in tensors_in(result)}
        for argument, value in given:
            for tensor in tensors_in(value):
                address = _address(tensor)
                weight = self._at.get(address)
                if weight is None:
                    continue
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.others[weight] = f"it is written to by {name}"
                elif address in outputs:
                    continue  # a view: what reads it lies in the same storage
                elif fused is not None and argument.name in fused:
                    self._note(weight, fused[argument.name] <= self._lowered, name)
                elif func is torch.ops.aten._to_copy.default:
                    self._note_copy(weight, tensor, kwargs)
                else:
                    self._note(weight, False, name)
        return result

    def _note(self, weight: str, cast: bool, op: str) -> None:
        if cast:
            self.casts.add(weight)
        else:
            self.others.setdefault(weight, f"{op} reads it uncast")

    def _note_copy(self, weight: str, view: torch.Tensor, kwargs: dict[str, Any]) -> None:
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        if self.converting:
            self.others.setdefault(weight, "the model converts it itself, whatever autocast does")
        elif dtype is not self._low or (device is not None and device != view.device):
            self.others.setdefault(weight, f"it is copied to {dtype or view.dtype}")
        elif kwargs.get("memory_format") not in (None, torch.preserve_format):
            self.others.setdefault(weight, "it is cast to another memory format")
        elif not _dense(view):
            self.others.setdefault(weight, "a view with gaps is cast, which would keep its gaps")
        else:
            self.casts.add(weight)

    def reason(self, weight: Weight) -> str | None:
        """Why this parameter must stay, or None if all that reads it casts it."""
        if weight.name in self.others:
            return self.others[weight.name]
        return None if weight.name in self.casts else "nothing read it in the example"


class Conversions(TorchFunctionMode):
    """Tells :class:`Reads` which casts are the model's own, such as ``weight.to(x.dtype)``.

    Those may be others with other inputs. Below autocast they look like its own, which are those
    in a function of torch that is told no dtype and is no conversion; a cast in no such function is
    one of compiled code. With a function mode on, torch's fused transformer kernels aren't taken,
    so it is not on in every run.
    """

    _NAMES = frozenset(
        ["to", "type", "type_as", "bfloat16", "half", "float", "_to_copy"]
        + ["tensor", "as_tensor", "asarray", "new_tensor"]
    )

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        told = any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values()))
        before = self._reads.converting
        self._reads.converting = told or getattr(func, "__name__", "") in self._NAMES
        try:
            return func(*args, **kwargs)
        finally:
            self._reads.converting = before

    def __enter__(self) -> Conversions:
        self._reads.converting = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        self._reads.converting = False
        super().__exit__(*exc)  # type: ignore[no-untyped-call]


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie without gaps and overlaps, so that a copy has the same strides."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
