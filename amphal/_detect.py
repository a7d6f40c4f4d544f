"""``detect()`` and :class:`Plan`: the only place that chooses a device, a dtype and a scaler."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from . import _agree, _env, _registry
from ._backend import (
    LOW_PRECISION,
    PRECISIONS,
    Availability,
    Backend,
    DtypeSupport,
    Hardware,
    ScalerSupport,
)
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendError,
    DeviceNotAvailableError,
    PrecisionWarning,
    UnsupportedPrecisionError,
    did_you_mean,
)

if TYPE_CHECKING:
    from ._autocast import Region
    from ._scaler import GradScaler

__all__ = [
    "DeviceLike",
    "Plan",
    "PrecisionLike",
    "detect",
    "named_device",
    "named_precision",
    "on_clear",
    "require_available",
]

DeviceLike = str | torch.device | Hardware
PrecisionLike = str | torch.dtype

_DEVICE_STRING = re.compile(r"([a-z][a-z0-9_]*)(?::(\d+))?\Z")
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_FULL = DtypeSupport("native", False, "full precision")


def short_name(dtype: torch.dtype) -> str:
    """``"bf16"``, ``"fp16"`` or ``"fp32"``."""
    return _SHORT[dtype]


@dataclass(frozen=True, eq=True)
class Plan:
    """What mixed precision should be on one device, and why. Immutable, hashable, picklable."""

    device: torch.device
    """Where to run: with the index that was named, without one if none was."""
    dtype: torch.dtype
    """bfloat16, float16, or float32 where low precision doesn't pay."""
    use_scaler: bool
    """True where gradients of this dtype need loss scaling (float16)."""
    fused_optimizers: bool
    """True where torch's fused optimizers run on this device."""
    hardware: Hardware
    """The facts that the choice was made from."""
    support: Mapping[torch.dtype, DtypeSupport] = field(hash=False)
    """What every dtype is worth on this hardware; read-only."""
    reasons: tuple[str, ...] = field(hash=False)
    """Why: the device, the dtype, the scaler, one phrase each."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "support", MappingProxyType(dict(self.support)))

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            Plan,
            (
                self.device,
                self.dtype,
                self.use_scaler,
                self.fused_optimizers,
                self.hardware,
                dict(self.support),
                self.reasons,
            ),
        )

    def autocast(self, *, enabled: bool = True, cache_enabled: bool | None = None) -> Region:
        """A region of this plan's dtype on this plan's device: ``amphal.autocast(plan)``."""
        from ._autocast import autocast

        return autocast(self, enabled=enabled, cache_enabled=cache_enabled)

    def grad_scaler(self, **kwargs: Any) -> GradScaler:
        """``amphal.GradScaler(plan, **kwargs)``: it scales only where the plan needs it."""
        from ._scaler import GradScaler

        return GradScaler(self, **kwargs)

    def explain(self) -> str:
        """The plan and its reasons as a paragraph that a person reads."""
        scaler = "with" if self.use_scaler else "without"
        head = (
            f"{self.hardware.name} ({self.device}): {short_name(self.dtype)} {scaler} a gradient "
            f"scaler, {'fused' if self.fused_optimizers else 'unfused'} optimizers."
        )
        return " ".join([head, *(f"{reason[0].upper()}{reason[1:]}." for reason in self.reasons)])

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON-able values."""
        return {
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "use_scaler": self.use_scaler,
            "fused_optimizers": self.fused_optimizers,
            "hardware": self.hardware.to_dict(),
            "support": {
                short_name(dtype): {
                    "level": s.level,
                    "accelerated": s.accelerated,
                    "why": s.why,
                }
                for dtype, s in self.support.items()
            },
            "reasons": list(self.reasons),
        }


def named_device(device: object, what: str = "device") -> tuple[str, int | None]:
    """The device type and index of a string or a ``torch.device``, registered or not.

    Raises:
        ArgumentTypeError: neither of the two.
        ArgumentError: a string that is no device.
    """
    if isinstance(device, torch.device):
        return device.type, device.index
    if not isinstance(device, str):
        raise ArgumentTypeError(
            f"{what} must be a string such as 'cuda' or 'cuda:0', a torch.device, an amphal.Plan "
            f"or None, got {type(device).__name__} ({device!r})"
        )
    match = _DEVICE_STRING.match(device)
    if match is None:
        known = _registry.registered_backends()
        raise ArgumentError(
            f"{what} must look like 'cuda' or 'cuda:0', got {device!r}; "
            f"registered: {', '.join(sorted(known))}.{did_you_mean(device.lower(), known)}"
        )
    return match[1], int(match[2]) if match[2] else None


def named_precision(precision: object, what: str = "precision") -> torch.dtype:
    """The dtype that a name or a torch dtype stands for.

    Raises:
        ArgumentTypeError: neither a string nor a dtype.
        UnsupportedPrecisionError: a string or dtype that is no precision of autocast.
    """
    if isinstance(precision, str):
        if precision.lower() in PRECISIONS:
            return PRECISIONS[precision.lower()]
    elif isinstance(precision, torch.dtype):
        if precision in _SHORT:
            return precision
    else:
        raise ArgumentTypeError(
            f"{what} must be 'bf16', 'fp16', 'fp32' or one of those three torch dtypes, "
            f"got {type(precision).__name__} ({precision!r})"
        )
    hint = did_you_mean(str(precision), PRECISIONS)
    raise UnsupportedPrecisionError(
        f"{what} must be 'bf16', 'fp16', 'fp32' or one of those three torch dtypes, "
        f"got {precision!r}.{hint}"
    )


def require_available(backend: Backend, named: str) -> None:
    """Raise :class:`DeviceNotAvailableError` unless the backend's device can be used now."""
    answer = _registry.availability(backend)
    if not answer:
        raise DeviceNotAvailableError(
            f"{named!r} was asked for, but is not available here: {answer.reason}. "
            f"Available: {', '.join(_available_names()) or 'nothing'}. "
            "amphal.detect() without a device takes the best of these"
        )


def _available_names() -> list[str]:
    rows = _registry.registered_backends().values()
    return [r.backend.device_type for r in rows if r.backend and _registry.availability(r.backend)]


def _probe(backend: Backend, index: int | None) -> Hardware:
    named = backend.device_type if index is None else f"{backend.device_type}:{index}"
    try:
        hardware = backend.probe(index)
    except Exception as exc:
        raise DeviceNotAvailableError(
            f"{named!r} could not be probed: {type(exc).__name__}: {exc}"
        ) from exc
    if not isinstance(hardware, Hardware) or hardware.device_type != backend.device_type:
        raise BackendError(
            f"probe() of the backend {backend.device_type!r} must return an amphal.Hardware of "
            f"that device type, got {hardware!r}"
        )
    return hardware


def _facts(
    backend: Backend, hardware: Hardware
) -> tuple[dict[torch.dtype, DtypeSupport], ScalerSupport]:
    try:
        support = dict(backend.dtypes(hardware))
        scaler = backend.scaler(hardware)
    except Exception as exc:
        raise BackendError(
            f"the backend {backend.device_type!r} failed on {hardware.name!r}: "
            f"{type(exc).__name__}: {exc}"
        ) from exc
    wrong = [k for k, v in support.items() if not isinstance(v, DtypeSupport) or k not in _SHORT]
    if wrong or not isinstance(scaler, ScalerSupport):
        raise BackendError(
            f"the backend {backend.device_type!r} must map bfloat16 and float16 to "
            f"amphal.DtypeSupport and answer scaler() with an amphal.ScalerSupport, "
            f"got {support!r} and {scaler!r}"
        )
    missing = DtypeSupport("absent", False, "the backend declares no support for it")
    for dtype in LOW_PRECISION:
        support.setdefault(dtype, missing)
    support.setdefault(torch.float32, _FULL)
    return support, scaler


def _has_scaler(backend: Backend, scaler: ScalerSupport) -> bool:
    return scaler.detects_overflow or backend.vendor_scaler is not None


def _scaler_of(hardware: Hardware) -> tuple[Backend, ScalerSupport]:
    backend = _registry.get_backend(hardware.device_type)
    return backend, _facts(backend, hardware)[1]


def _choose(
    support: Mapping[torch.dtype, DtypeSupport], can_scale: bool
) -> tuple[torch.dtype, list[str]]:
    """Native and accelerated bf16, else accelerated fp16 with a scaler, else float32."""
    bf16, fp16 = support[torch.bfloat16], support[torch.float16]
    if bf16.level == "native" and bf16.accelerated:
        return torch.bfloat16, [f"chose bf16, native and faster than fp32 here: {bf16.why}"]
    no_bf16 = f"no bf16 by default ({_worth(bf16)}): {bf16.why}"
    if fp16.level != "absent" and fp16.accelerated:
        if can_scale:
            return torch.float16, [f"chose fp16, faster than fp32 here: {fp16.why}", no_bf16]
        no_fp16 = "no fp16: this hardware saturates instead of overflowing, so nothing can see it"
        return torch.float32, ["low precision doesn't pay here", no_bf16, no_fp16]
    no_fp16 = f"no fp16 by default ({_worth(fp16)}): {fp16.why}"
    return torch.float32, ["low precision doesn't pay here", no_bf16, no_fp16]


def _worth(s: DtypeSupport) -> str:
    if s.level == "absent":
        return "absent"
    return f"{s.level}, {'faster' if s.accelerated else 'not faster'} than fp32"


def _plan(
    backend: Backend,
    hardware: Hardware,
    device: torch.device,
    precision: torch.dtype | None,
    by: str,
    reasons: list[str],
) -> tuple[Plan, str]:
    """The plan, and a warning about it or an empty string. Pure."""
    support, scaler = _facts(backend, hardware)
    can_scale = _has_scaler(backend, scaler)
    warning = ""
    if precision is None:
        dtype, why = _choose(support, can_scale)
    else:
        dtype, s = precision, support[precision]
        if s.level == "absent":
            can = [short_name(d) for d, v in support.items() if v.level != "absent"]
            raise UnsupportedPrecisionError(
                f"{by} asks for {short_name(dtype)}, which {hardware.name} ({device}) cannot do: "
                f"{s.why}. It can do: {', '.join(can)}"
            )
        why = [f"asked for {short_name(dtype)} ({by}): {s.why}"]
        if dtype in LOW_PRECISION and (s.level == "emulated" or not s.accelerated):
            warning = (
                f"{by} asks for {short_name(dtype)} on {hardware.name} ({device}), where it is "
                f"{_worth(s)}: {s.why}. amphal.detect() would choose "
                f"{short_name(_choose(support, can_scale)[0])}"
            )
    use_scaler = dtype is torch.float16 and can_scale
    if use_scaler:
        why.append("the scaler is on, because fp16 gradients underflow without loss scaling")
    elif dtype is torch.float16:
        note = "no scaler: this hardware saturates instead of overflowing, so it could not work"
        why.append(note)
        warning = f"{warning}. {note}" if warning else f"{hardware.name}: {note}"
    plan = Plan(
        device, dtype, use_scaler, scaler.fused_optimizers, hardware, support, (*reasons, *why)
    )
    return plan, warning


def _torch_device(device_type: str, index: int | None) -> torch.device:
    try:
        return torch.device(device_type) if index is None else torch.device(device_type, index)
    except RuntimeError:
        # A plug-in's device type, asked about where its torch extension isn't loaded.
        return (
            torch.device("privateuseone") if index is None else torch.device("privateuseone", index)
        )


def _best() -> tuple[Backend, Hardware, list[str]]:
    """The available backend of highest priority that can be probed."""
    backends = [r.backend for r in _registry.registered_backends().values() if r.backend]
    backends.sort(key=lambda b: (-b.priority, b.device_type))
    passed: list[str] = []
    for backend in backends:
        answer = _registry.availability(backend)
        if answer:
            try:
                hardware = _probe(backend, None)
            except (DeviceNotAvailableError, BackendError) as exc:
                answer = Availability(False, str(exc))
            else:
                note = "the available backend of highest priority"
                reasons = [f"chose {backend.device_type}, {note}"]
                if passed:
                    reasons.append(f"not available: {'; '.join(passed)}")
                return backend, hardware, reasons
        passed.append(f"{backend.device_type} ({answer.reason})")
    raise DeviceNotAvailableError(
        "no registered backend has a device here: "
        + ("; ".join(passed) or "none is registered")
        + ". Is amphal installed (pip install -e .), with its entry points?"
    )


def _named(device: object, precision: object) -> tuple[torch.dtype | None, str]:
    """The precision that the user named, None for "auto", and where it was named."""
    if not (isinstance(precision, str) and precision.lower() == "auto"):
        return named_precision(precision), f"precision={precision!r}"
    # A Hardware is a question about another machine: this one's environment has no say in it.
    env_precision = "" if isinstance(device, Hardware) else _env.read(_env.PRECISION)
    auto = env_precision.lower() in ("", "auto")
    dtype = None if auto else named_precision(env_precision, what=_env.PRECISION)
    return dtype, f"{_env.PRECISION}={env_precision}"


def _resolve(
    device: object, precision: object
) -> tuple[Plan, str, Callable[[], int | None] | None]:
    env_device = "" if device is not None else _env.read(_env.DEVICE)
    dtype, by = _named(device, precision)

    if isinstance(device, Hardware):
        backend = _registry.get_backend(device.device_type)
        where = _torch_device(device.device_type, device.index)
        plan, warning = _plan(backend, device, where, dtype, by, ["for the hardware you described"])
        return plan, warning, None

    current = None
    if device is None and not env_device:
        backend, hardware, reasons = _best()
        index = None
        current = backend.current_index
    else:
        what = "device" if device is not None else _env.DEVICE
        device_type, index = named_device(device if device is not None else env_device, what)
        backend = _registry.get_backend(device_type)
        named = device_type if index is None else f"{device_type}:{index}"
        require_available(backend, named)
        hardware = _probe(backend, index)
        reasons = [f"you named {named}" if device is not None else f"{what}={env_device}"]
        if index is None:
            current = backend.current_index
    where = _torch_device(backend.device_type, index)
    plan, warning = _plan(backend, hardware, where, dtype, by, reasons)
    return plan, warning, current


class _Detect(Protocol):
    def __call__(
        self,
        device: DeviceLike | None = None,
        *,
        precision: PrecisionLike = "auto",
        process_group: Any = None,
    ) -> Plan: ...

    def cache_clear(self) -> None: ...


# One entry per question: the plan, and for a device without an index how to ask which is current.
_Answer = tuple[Plan, Callable[[], int | None] | None, int | None]
_cache: dict[tuple[object, object, str, str], _Answer] = {}
_warned: set[tuple[str, str, torch.dtype]] = set()


_listeners: list[Callable[[], object]] = []


def on_clear(callback: Callable[[], object]) -> None:
    """Call ``callback`` when the answers are forgotten, for caches that were built from them."""
    _listeners.append(callback)


def _cache_clear() -> None:
    """Forget every answer: after plugging in a device, or in tests."""
    _cache.clear()
    _warned.clear()
    for callback in _listeners:
        callback()


def _detect(
    device: DeviceLike | None = None,
    *,
    precision: PrecisionLike = "auto",
    process_group: Any = None,
) -> Plan:
    """Choose a device, a dtype and whether to scale, and say why.

    Native and accelerated bf16 is taken first, else accelerated fp16 with a gradient scaler, else
    float32. A precision that you name is used if the hardware can do it at all, with one warning
    if it is emulated or not faster than fp32.

    Args:
        device: None (the best available), a string with or without an index, a ``torch.device``,
            or a :class:`Hardware`, which answers for a machine you don't have and reads nothing
            from this one.
        precision: ``"auto"``, ``"bf16"``, ``"fp16"``, ``"fp32"`` or one of those torch dtypes.
        process_group: agree with the ranks of this group on one precision that all of them can do;
            ``plan.reasons`` says who held it back. A collective, never cached: all ranks call it.

    ``AMPHAL_DEVICE`` and ``AMPHAL_PRECISION`` stand in for arguments that are left out. Answers
    are cached per device; ``detect.cache_clear()`` forgets them.

    Raises:
        UnknownDeviceError: no backend is registered for the device type.
        DeviceNotAvailableError: the backend is there, the device is not.
        UnsupportedPrecisionError: the hardware cannot do the precision at all.
        ArgumentError, ArgumentTypeError: anything else that is no device or precision.

    With a process group, what one rank raises is raised on all of them.
    """
    if process_group is not None:
        return _agree.detect(
            process_group,
            lambda: (_detect(device, precision=precision), _named(device, precision)[0]),
            lambda plan: _has_scaler(*_scaler_of(plan.hardware)),
            _choose,
        )
    key = (device, precision, _env.read(_env.DEVICE), _env.read(_env.PRECISION))
    try:
        plan, current, index = _cache[key]
        if current is None or current() == index:
            return plan
    except (KeyError, TypeError):
        pass
    plan, warning, current = _resolve(device, precision)
    told = (plan.device.type, plan.hardware.name, plan.dtype)
    if warning and told not in _warned:
        _warned.add(told)
        warnings.warn(warning, PrecisionWarning, stacklevel=_caller_level())
    _cache[key] = (plan, current, None if current is None else current())
    return plan


def _caller_level() -> int:
    """The ``stacklevel`` of the first frame outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        level, frame = level + 1, frame.f_back
    return level


_detect.__name__ = _detect.__qualname__ = "detect"
_detect.cache_clear = _cache_clear  # type: ignore[attr-defined]
detect = cast(_Detect, _detect)
_registry.on_change(_cache_clear)
