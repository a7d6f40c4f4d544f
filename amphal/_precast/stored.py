"""What ``precast_`` leaves on a model: what is stored low, the checks, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .._autocast import STORED_MARK
from .._casting import policy
from .._torch import private
from ..contract import short_name
from ..errors import PrecastError, StateDictError
from .readers import Weight
from .torch_modules import FusedLayer, fused_layers

__all__ = [
    "State",
    "Stored",
    "originals",
    "policy_changes",
    "same_bits",
    "states_in",
    "stored_in",
]

_ATTRIBUTE = "_amphal_precast"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are alike in dtype, shape and every bit."""
    if a.dtype is not b.dtype or a.shape != b.shape or a.layout is not b.layout:
        return False
    if a.layout is not torch.strided or a.is_quantized:
        return torch.equal(a, b)
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


class Stored:
    """A parameter that is stored low. Found by its place: loading may put another object there."""

    def __init__(self, weight: Weight, keep: bool) -> None:
        self.names, self.places = weight.names, weight.places
        self.dtype, self.low = weight.param.dtype, weight.param.dtype
        self.bytes_saved = 0
        self.kept: torch.Tensor | None = None
        """The exact original, in host memory."""
        self._keep = keep

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def param(self) -> nn.Parameter:
        module, local = self.places[0]
        param = module._parameters.get(local)
        if param is None:
            raise PrecastError(
                f"{self.name} was precast and is no parameter of its module now: take off the "
                "parametrization or pruning, or put the parameter back, and call undo_precast_ "
                "again"
            )
        return param

    def lower(self, low: torch.dtype) -> None:
        data = self.param.data
        self.low, cast = low, data.to(low)
        if self._keep:
            self.kept = data.cpu()
        self.bytes_saved = data.nbytes - cast.nbytes
        self.param.data = cast

    def put(self, value: torch.Tensor) -> None:
        """Store ``value``, at every place of it."""
        done: dict[int, torch.Tensor] = {}
        for module, local in self.places:
            param = module._parameters[local]
            if param is not None and id(param) not in done:
                done[id(param)] = param
                param.data = value.to(device=param.device, copy=True)


class State:
    """The record on a model, and the check before each forward: a hook that can be pickled."""

    amphal_guard = True

    def __init__(self, low: torch.dtype, device_type: str, lowered: frozenset[str]) -> None:
        self.low, self.device_type = low, device_type
        self.lowered = tuple(sorted(lowered))
        self.policy = policy_changes(device_type)
        self.stored: dict[str, Stored] = {}
        self.region_inside = False
        """The model enters regions of its own, so that none is needed around it."""
        self.vmap_inside = False
        """The trial ran the model under ``torch.func.vmap``."""
        self.trying = False
        self._handles: list[Any] = []
        self._loads: list[tuple[nn.Module, _Load]] = []
        self._fused: list[FusedLayer] = []
        self._watched: list[tuple[str, dict[str, Any], str]] = []

    def attach(self, model: nn.Module) -> None:
        """Put the checks on the model and the modules that hold what is stored."""
        if not self._handles:
            setattr(model, _ATTRIBUTE, self)
            self._handles.append(model.register_forward_pre_hook(self))
        loads = {id(module): load for module, load in self._loads}
        for load in loads.values():
            load.stored.clear()
        for stored in self.stored.values():
            for module, local in stored.places:
                if id(module) not in loads:
                    loads[id(module)] = _Load()
                    setattr(module, STORED_MARK, loads[id(module)].stored)
                    self._loads.append((module, loads[id(module)]))
                    add: Any = module.register_load_state_dict_pre_hook
                    self._handles.append(add(loads[id(module)]))
                loads[id(module)].stored[local] = stored
        self._fused = fused_layers(
            model, {id(m): load.stored.keys() for m, load in self._loads if load.stored}
        )
        self._watched = [
            (s.name, module._parameters, local)
            for s in self.stored.values()
            for module, local in s.places[:1]
        ]

    def detach(self, model: nn.Module) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, _ in self._loads:
            vars(module).pop(STORED_MARK, None)
        self._loads.clear()
        self._fused.clear()
        self._watched.clear()
        vars(model).pop(_ATTRIBUTE, None)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Refuse to run where the outputs would silently be other ones."""
        device = self.device_type
        if not self.region_inside:
            on = torch.is_autocast_enabled(device)
            if not on or torch.get_autocast_dtype(device) is not self.low:
                self._refuse_region(module, on)
        if not _policy_fits(device, self.policy, self.lowered):
            raise PrecastError(
                f"{type(module).__name__} was precast under another casting policy (ops=): "
                f"precast_ it in the region that it runs in. {_BACK}"
            )
        if not self.vmap_inside and private.under_vmap():
            if not self.trying:
                raise PrecastError(
                    f"{type(module).__name__} was precast without torch.func.vmap around it, in "
                    "which autocast casts less: precast_ it with example_inputs=lambda model: "
                    f"vmap(model)(...). {_BACK}"
                )
            self.vmap_inside = True
        for layer in self._fused:
            why = layer.off()
            if why:
                raise PrecastError(
                    f"{why} since {type(module).__name__} was precast, which takes that layer off "
                    f"its fused kernel: precast_ it as it is now. {_BACK}"
                )
        low, param = self.low, None
        for name, params, local in self._watched:
            param = params.get(local)
            if param is None or param.requires_grad or param.dtype is not low:
                self._refuse_parameter(name, param)
        # Of the last alone: the question takes longer than the others, and a model moves as one.
        if param is not None and param.device.type != device:
            self._refuse_parameter(name, param)

    def _refuse_parameter(self, name: str, param: torch.Tensor | None) -> None:
        low = short_name(self.low)
        if param is None:
            raise PrecastError(
                f"{name} was precast and is no parameter of its module now: call undo_precast_ "
                "before you parametrize, prune or replace what it holds"
            )
        if param.requires_grad:
            raise PrecastError(
                f"{name} is stored in {low} and requires a gradient now: "
                "call amphal.undo_precast_(model) before you unfreeze parameters"
            )
        raise PrecastError(
            f"{name} was precast to {low} on {self.device_type} and is {param.dtype} on "
            f"{param.device} now: undo_precast_ the model before you convert it or move it to "
            "another kind of device, and precast_ it again there"
        )

    def _refuse_region(self, module: nn.Module, on: bool) -> None:
        now = short_name(torch.get_autocast_dtype(self.device_type)) if on else ""
        raise PrecastError(
            f"{type(module).__name__} was precast to {short_name(self.low)} and runs in "
            f"{f'a region of {now}' if now else 'no autocast region'} "
            f"of {self.device_type!r}: enter amphal.autocast("
            f"{self.device_type!r}, dtype={short_name(self.low)!r}) around it. {_BACK}"
        )


_BACK = "amphal.undo_precast_(model) undoes precast_"


class _Load:
    """Before a module loads a state dict: keep the originals true, and the stored dtype."""

    # It holds no more than its module needs: a copy of that module copies this too.
    def __init__(self) -> None:
        self.stored: dict[str, Stored] = {}

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *rest: Any
    ) -> None:
        for local, stored in self.stored.items():
            param, value = module._parameters.get(local), state_dict.get(prefix + local)
            if param is None or not isinstance(value, torch.Tensor) or value.shape != param.shape:
                continue
            if stored.kept is not None:
                stored.kept = value.detach().to(stored.dtype, copy=True).cpu()
            if metadata.get("assign_to_params_buffers") and not value.is_meta:
                state_dict[prefix + local] = value.detach().to(stored.low)


Changes = tuple[tuple[str, str], ...]


def policy_changes(device_type: str) -> Changes:
    """What regions with ``ops=`` change on this device in this thread: op to policy."""
    effective = policy.active()
    if effective is None:
        return ()
    key = private.autocast_key(device_type)
    tables = effective.tables
    return tuple(sorted((op, tables[k][op]) for op, k in effective.actions if k == key))


@private.constant_in_graphs
def _policy_fits(device_type: str, then: Changes, lowered: tuple[str, ...]) -> bool:
    """Whether the policy in force casts to the low precision what it did then."""
    now = policy_changes(device_type)
    if now == then:
        return True
    return not any("lower_precision" in pair or pair[0] in lowered for pair in set(now) ^ set(then))


def states_in(model: nn.Module) -> list[tuple[nn.Module, State]]:
    """The records on a model and in it."""
    return [(m, vars(m)[_ATTRIBUTE]) for m in model.modules() if _ATTRIBUTE in vars(m)]


def stored_in(model: nn.Module) -> list[Stored]:
    """What the modules in it hold, also where the record is on a model that holds this one."""
    found = {id(s): s for _, state in states_in(model) for s in state.stored.values()}
    found |= {id(s): s for m in model.modules() for s in vars(m).get(STORED_MARK, {}).values()}
    return list(found.values())


def originals(
    those: Iterable[Stored], given: Mapping[str, Any] | None, rounded: bool
) -> Iterator[Any]:
    """Each stored parameter with its original values; checks all, changes nothing."""
    for stored in those:
        now = stored.param.data
        source = stored.kept
        if given is not None:
            source = next((given[n] for n in stored.names if n in given), source)
        if source is None and not rounded:
            raise StateDictError(
                f"the original values of {stored.name} were not kept"
                f"{' and are not in the state dict' if given is not None else ''}: pass "
                "state_dict= with them, or rounded=True to go on with what is stored"
            )
        if source is not None:
            fits = isinstance(source, torch.Tensor) and source.shape == now.shape
            if fits and same_bits(source.to(device=now.device, dtype=stored.low), now):
                yield stored, source.detach().to(stored.dtype)
                continue
            if not rounded:
                raise StateDictError(
                    f"{stored.name} is not the {short_name(stored.low)} of these originals: it "
                    "was changed since, or they are another model's. Pass rounded=True to "
                    "go on with what is stored"
                )
        yield stored, now.to(stored.dtype)
