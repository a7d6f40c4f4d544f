"""Autocast kernels for what has none: a device whose maker brings none, and third-party ops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .._torch import private
from ..contract import LOW_PRECISION, declared_lists, op_names, registry, spelling
from ..errors import ArgumentError, ArgumentTypeError, BackendError, OpPolicyError
from . import installed as installer
from . import kernels as cast_kernels

__all__ = ["AutocastOp", "ensure_kernels", "register_autocast_op", "registered_policies"]

_lock = threading.Lock()
# By device type: the ops that amphal cast, and what keeps their kernels alive.
_installed: dict[str, tuple[frozenset[str], Any]] = {}
_ready: set[tuple[str, torch.dtype]] = set()


def ensure_kernels(device_type: str, dtype: torch.dtype) -> None:
    """Install casts for the ops that a backend declares and nothing casts: declared is live.

    torch casts on some devices by itself: a declared op without a kernel is of another torch there.
    On every other device, an extension may register no autocast kernels, the fallthrough alone, or
    part of them. Its own kernels stay; amphal adds the rest. Done once a device, for the rest of
    the process.

    Raises:
        BackendError: an op is declared with a policy that it cannot have, or the extension's module
            says that its autocast lacks ``dtype``; nothing was installed.
    """
    if (device_type, dtype) in _ready:
        return
    _agree(device_type, dtype)
    _install(device_type, dtype)
    _ready.add((device_type, dtype))


def unsupported_by_module(device_type: str, dtype: torch.dtype) -> str:
    """Why torch would turn a region of this dtype off on an extension's device; empty if not.

    torch reads ``get_amp_supported_dtype()`` of the extension's module where it makes a region,
    in ``torch.compile`` and ``torch.export`` too: it warns and runs float32 for any other dtype.
    """
    asked = getattr(getattr(torch, device_type, None), "get_amp_supported_dtype", None)
    if asked is None or not completes(device_type) or dtype in (supported := list(asked())):
        return ""
    names = ", ".join(map(str, supported)) or "none"
    return (
        f"torch.{device_type}.get_amp_supported_dtype() gives {names}, and not {dtype}, so "
        "torch.compile and torch.export would run float32"
    )


def _agree(device_type: str, dtype: torch.dtype) -> None:
    reason = unsupported_by_module(device_type, dtype)
    if reason:
        raise BackendError(
            f"the backend {device_type!r} offers {dtype}, but {reason}. Use another precision, or "
            "an extension and a backend that agree"
        )


def _install(device_type: str, dtype: torch.dtype) -> None:
    if device_type in _installed:
        return
    key = private.autocast_key(device_type)
    with _lock:
        if device_type in _installed:
            return
        if not completes(device_type):
            _installed[device_type] = frozenset(), None
            return
        backend = registry.get_backend(device_type)
        tables = {low: dict(declared_lists(backend, low)) for low in {dtype, *LOW_PRECISION}}
        for op, policy in sorted({pair for table in tables.values() for pair in table.items()}):
            reason = op_names.refusal(op, policy) if op_names.is_defined(op) else None
            if reason is not None:
                raise BackendError(
                    f"op_lists() of the backend {device_type!r} declares {op!r} {policy!r}, which "
                    f"makes no sense: {reason}"
                )
        live = {name.removeprefix("aten::") for name in private.registered_ops(key)}
        live -= installer.temporary_names(key)
        missing = frozenset(
            op
            for op in set().union(*tables.values()) - live
            if op_names.is_defined(op)
            and not {t.get(op, "as_is") for t in tables.values()} <= {"as_is", "unclassified"}
        )
        kernels = installer.Kernels(
            {(op, key): _static(_by_dtype(op, tables, device_type)) for op in sorted(missing)}
        )
        fallthrough = None
        if not private.has_fallthrough(key):
            fallthrough = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
            fallthrough.fallback(torch.library.fallthrough_kernel, key)  # type: ignore[no-untyped-call]
        kernels.put()
        _installed[device_type] = missing, (fallthrough, kernels)


def _by_dtype(
    op: str, tables: Mapping[torch.dtype, Mapping[str, str]], device_type: str
) -> cast_kernels.Action:
    """What the lists of the region's dtype say of ``op``; they may differ between dtypes."""
    pass_by = cast_kernels.PASS_BY
    policies = {low: table.get(op, pass_by) for low, table in tables.items()}
    cast_not = ("as_is", "unclassified")
    actions = {
        low: cast_kernels.action(op, pass_by if policy in cast_not else policy, device_type)
        for low, policy in policies.items()
    }
    if len(set(policies.values())) == 1:
        return next(iter(actions.values()))
    other = cast_kernels.action(op, pass_by, device_type)

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        low = torch.get_autocast_dtype(device_type)
        return actions.get(low, other)(keyset, args, kwargs)

    return run


def installed(device_type: str) -> frozenset[str]:
    """The ops of this device that amphal casts because nothing else did."""
    return _installed.get(device_type, (frozenset(), None))[0]


def completes(device_type: str) -> bool:
    """Whether a region on this device has casts for every declared op, by amphal where need be."""
    return private.autocast_key(device_type) not in private.TORCHS_OWN_AUTOCAST


def _static(run: cast_kernels.Action) -> Callable[..., Any]:
    return lambda keyset, *args, **kwargs: run(keyset, args, kwargs)


class AutocastOp:
    """An op's registered autocast rule; :meth:`remove` takes it back."""

    def __init__(self, names: tuple[str, ...], policy: str, device_types: tuple[str, ...]) -> None:
        self.ops = names
        self.policy = policy
        self.device_types = device_types
        self._kernels: list[installer.Kernels] = []
        self._actions: dict[tuple[str, str], cast_kernels.Action] = {}

    def remove(self) -> None:
        """Take the rule back: the op is no longer cast on these devices."""
        with _lock:
            for device in self.device_types:
                for op in self.ops:
                    if _rules.get((device, op)) is self:
                        del _rules[device, op]
            for kernels in self._kernels:
                installer.linger(kernels)
            self._kernels.clear()
            _changed()

    def __repr__(self) -> str:
        devices = ", ".join(self.device_types)
        return f"<AutocastOp {', '.join(self.ops)}: {self.policy} on {devices}>"


_rules: dict[tuple[str, str], AutocastOp] = {}
_on_change: list[Callable[[], object]] = []


def on_change(callback: Callable[[], object]) -> None:
    """Call ``callback`` whenever a rule is registered or removed: lists made before are stale."""
    _on_change.append(callback)


def _changed() -> None:
    for callback in _on_change:
        callback()


def rule_or_pass_by(op: str, device: str) -> cast_kernels.Action:
    """What the rule for an op that torch does not list does now; without one, autocast passes by.

    Kernels for such an op may outlive its rule, see :class:`amphal._registration.KernelSet`.
    """
    pass_by = cast_kernels.action(op, cast_kernels.PASS_BY, device)
    pair = (device, op)

    def run(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rule = _rules.get(pair)
        return (pass_by if rule is None else rule._actions[pair])(keyset, args, kwargs)

    return run


def registered_policies(device_type: str) -> dict[str, str]:
    """The ops that :func:`register_autocast_op` gave a rule on this device, with their policies."""
    return {op: rule.policy for (device, op), rule in list(_rules.items()) if device == device_type}


def register_autocast_op(
    op: Any, policy: str, device_types: str | Iterable[str] | None = None
) -> AutocastOp:
    """Give an op that torch's autocast does not list a casting policy, on every device or some.

    For custom ops and those of extensions, such as a fused attention. The dtype is that of the
    region at each call. It works on every torch from 2.6 and for every device type that has
    autocast; ``torch.library.register_autocast`` does since 2.13, with the dtype fixed.

    Args:
        op: a name (``"mylib::attention"``), an op of ``torch.ops``, or what
            ``torch.library.custom_op`` made. A bare name means all its overloads.
        policy: ``"lower_precision"``, ``"fp32"`` or ``"promote"``; ``"as_is"`` shields what the op
            is made of.
        device_types: one device type or several; None for all that have a backend.

    Returns:
        A handle; its ``remove()`` undoes the registration.

    Raises:
        OpPolicyError: no such op, a policy that makes no sense for it, or one that is listed on
            one of the devices already (``autocast(ops=...)`` changes those). Nothing was changed.
    """
    table = op_names.expand({_name(op): policy})
    devices = _devices(device_types)
    with _lock:
        for device in devices:
            key = private.autocast_key(device)
            # What a region left for other threads' sake does not count: it does what rules say.
            left = installer.temporary_names(key) - installer.temporary_names(key, True)
            left -= {name for name in table if (device, name) in _rules}
            listed = [
                name
                for name in table
                if name not in left and private.has_kernel(op_names.qualified(name), key)
            ]
            if listed:
                rule = _rules.get((device, listed[0]))
                by = (
                    f"amphal, as {rule.policy!r}; call remove() on what register_autocast_op() gave"
                    if rule
                    else ("torch or an extension; change it with amphal.autocast(ops=...)")
                )
                raise OpPolicyError(
                    f"{listed[0]!r} already has an autocast rule on {device!r}, by {by}"
                )
        rule = AutocastOp(tuple(table), policy, devices)
        for device in devices:
            key = private.autocast_key(device)
            rule._actions.update(
                {(device, n): cast_kernels.action(n, policy, device) for n in table}
            )
            run = {(n, key): _static(rule_or_pass_by(n, device)) for n in table}
            kernels = installer.Kernels(run)
            kernels.put()
            rule._kernels.append(kernels)
            _rules.update({(device, name): rule for name in table})
        _changed()
    return rule


def _name(op: Any) -> str:
    if isinstance(op, str):
        return op
    if isinstance(op, torch._ops.OpOverload):
        return op._name.removeprefix("aten::")
    name = getattr(op, "_qualified_op_name", None) or getattr(op, "_qualname", None)
    if not isinstance(name, str):
        raise ArgumentTypeError(
            "op must be a name such as 'mylib::attention', an op of torch.ops or one made by "
            f"torch.library.custom_op, got {type(op).__name__}"
        )
    return name


def _has_backend(device_type: str) -> bool:
    """Whether torch has autocast for it, and amphal a backend that loads."""
    if not private.autocast_available(device_type):
        return False
    try:
        registry.get_backend(device_type)
    except BackendError:
        return False
    return True


def _devices(device_types: Any) -> tuple[str, ...]:
    if device_types is None:
        return tuple(n for n in registry.known_names() if _has_backend(n))
    given = [device_types] if isinstance(device_types, str) else list(device_types)
    names = [spelling.named_device(d, what="device_types")[0] for d in given]
    for name in names:
        registry.get_backend(name)
        if not private.autocast_available(name):
            raise ArgumentError(f"torch has no autocast for device type {name!r}")
    return tuple(dict.fromkeys(names))
