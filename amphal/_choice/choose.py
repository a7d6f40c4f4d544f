"""``detect()``: asks the machine, and lets the pure rules of ``choice`` choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from .. import _environment
from .._torch import private
from .._warnings import warn
from ..contract import (
    Availability,
    Backend,
    DeviceLike,
    Hardware,
    PrecisionLike,
    ScalerSupport,
    answering,
    failing_as,
    named_device,
    named_precision,
    reason_of,
    registry,
    shown,
)
from ..errors import AmphalError, BackendError, DeviceNotAvailableError, PrecisionWarning
from . import choice
from .choice import Choice

__all__ = [
    "Choice",
    "DeviceLike",
    "PrecisionLike",
    "detect",
    "named_device",
    "named_precision",
    "on_clear",
    "require_available",
]


def require_available(backend: Backend, named: str) -> None:
    """Raise :class:`DeviceNotAvailableError` unless the backend's device can be used now."""
    answer = registry.availability(backend)
    if not answer:
        raise DeviceNotAvailableError(
            f"{named!r} was asked for, but is not available here: {answer.reason}. "
            f"Available: {_available()}. "
            "amphal.detect() without a device takes the best of all that are installed"
        )


def _available() -> str:
    """The devices that can be used, without importing a plug-in that nobody named."""
    loaded, others = registry.loaded_backends()
    names = sorted(b.device_type for b in loaded if registry.availability(b))
    unasked = f" (not asked, since not named: {', '.join(others)})" if others else ""
    return (", ".join(names) or "nothing") + unasked


def _probe(backend: Backend, index: int | None) -> Hardware:
    named = backend.device_type if index is None else f"{backend.device_type}:{index}"
    told = f"{named!r} could not be probed:"
    with failing_as(DeviceNotAvailableError, told), answering(backend, "probe"):
        hardware = backend.probe(index)
    if not isinstance(hardware, Hardware) or hardware.device_type != backend.device_type:
        raise BackendError(
            f"probe() of the backend {backend.device_type!r} must return an amphal.Hardware of "
            f"that device type, got {shown(hardware)}"
        )
    return hardware


def _scaler_of(hardware: Hardware) -> tuple[Backend, ScalerSupport]:
    backend = registry.get_backend(hardware.device_type)
    return backend, choice.facts(backend, hardware)[1]


def _known_to_torch(device_type: str) -> bool:
    try:
        torch.device(device_type)
    except RuntimeError:
        return False
    return True


def _torch_device(device_type: str, index: int | None) -> torch.device:
    try:
        return torch.device(device_type) if index is None else torch.device(device_type, index)
    except RuntimeError:
        # A plug-in's device type, asked about where its torch extension isn't loaded.
        return (
            torch.device("privateuseone") if index is None else torch.device("privateuseone", index)
        )


def _usable(backend: Backend) -> Hardware:
    """The device's facts, if everything that a plan of it needs can be had.

    Raises:
        DeviceNotAvailableError, BackendError: why the device cannot be chosen unasked.
    """
    hardware = _probe(backend, None)
    choice.facts(backend, hardware)
    _current_index(backend)
    if not _known_to_torch(backend.device_type):
        raise DeviceNotAvailableError(
            f"torch has no device type {backend.device_type!r} here, although its backend says "
            "that it is available: what gives torch the device was not imported"
        )
    return hardware


def _best() -> tuple[Backend, Hardware, list[str]]:
    """The available backend of highest priority that a plan can be made of."""
    backends = [r.backend for r in registry.registered_backends().values() if r.backend]
    backends.sort(key=lambda b: (-b.priority, b.device_type))
    passed: list[str] = []
    for backend in backends:
        answer = registry.availability(backend)
        if answer:
            try:
                hardware = _usable(backend)
            except AmphalError as exc:
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
        return named_precision(precision, "precision"), f"precision={precision!r}"
    # A Hardware is a question about another machine: this one's environment has no say in it.
    env_precision = (
        "" if isinstance(device, Hardware) else _environment.read(_environment.PRECISION)
    )
    auto = env_precision.lower() in ("", "auto")
    dtype = None if auto else named_precision(env_precision, what=_environment.PRECISION)
    return dtype, f"{_environment.PRECISION}={env_precision}"


def _resolve(device: object, precision: object) -> tuple[Choice, str, Backend | None]:
    env_device = "" if device is not None else _environment.read(_environment.DEVICE)
    dtype, by = _named(device, precision)

    if isinstance(device, Hardware):
        backend = registry.get_backend(device.device_type)
        where = _torch_device(device.device_type, device.index)
        plan, warning = choice.decide(
            backend, device, where, dtype, by, ["for the hardware you described"]
        )
        return plan, warning, None

    if device is None and not env_device:
        backend, hardware, reasons = _best()
        index = None
    else:
        what = "device" if device is not None else _environment.DEVICE
        given = device if device is not None else env_device.lower()
        device_type, index = named_device(given, what, also="an amphal.Hardware")
        backend = registry.get_backend(device_type)
        named = device_type if index is None else f"{device_type}:{index}"
        require_available(backend, named)
        hardware = _probe(backend, index)
        reasons = [f"you named {named}" if device is not None else f"{what}={env_device}"]
    where = _torch_device(backend.device_type, index)
    plan, warning = choice.decide(backend, hardware, where, dtype, by, reasons)
    return plan, warning, backend if index is None else None


def _current_index(backend: Backend) -> int | None:
    try:
        index = backend.current_index()
    except (KeyboardInterrupt, AmphalError):
        raise
    except BaseException as exc:
        raise BackendError(
            f"current_index() of the backend {backend.device_type!r} raised {reason_of(exc)}"
        ) from exc
    if index is not None and not isinstance(index, int):
        raise BackendError(
            f"current_index() of the backend {backend.device_type!r} must return an int or None, "
            f"got {shown(index)}"
        )
    return index


class _Detect(Protocol):
    def __call__(
        self,
        device: DeviceLike | None = None,
        *,
        precision: PrecisionLike = "auto",
        process_group: Any = None,
    ) -> Choice: ...

    def cache_clear(self) -> None: ...


# One entry per question: the plan, and for a device without an index its backend and the index
# that was current.
_Answer = tuple[Choice, Backend | None, int | None]
_cache: dict[tuple[object, object], _Answer] = {}
_MOST = 256
_warned: set[tuple[str, str, torch.dtype]] = set()
_generation = [0]

_listeners: list[Callable[[], object]] = []


def on_clear(callback: Callable[[], object]) -> None:
    """Call ``callback`` when the answers are forgotten, for caches that were built from them."""
    _listeners.append(callback)


def generation() -> int:
    """Counts how often the answers were forgotten, for those who are making one meanwhile."""
    return _generation[0]


def _cache_clear() -> None:
    """Forget every answer and the environment: after a device was plugged in, or in tests."""
    _generation[0] += 1
    _environment.forget()
    _cache.clear()
    _warned.clear()
    for callback in _listeners:
        callback()


def _detect(
    device: DeviceLike | None = None,
    *,
    precision: PrecisionLike = "auto",
    process_group: Any = None,
) -> Choice:
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

    ``AMPHAL_DEVICE`` and ``AMPHAL_PRECISION`` stand in for arguments that are left out. They are
    read once, at the first question. Answers are cached per device. ``detect.cache_clear()``
    forgets both; so does a change of the registry.

    Raises:
        UnknownDeviceError: no backend is registered for the device type.
        DeviceNotAvailableError: the backend is there, the device is not.
        UnsupportedPrecisionError: the hardware cannot do the precision at all.
        ArgumentError, ArgumentTypeError: anything else that is no device or precision.

    With a process group, what one rank raises is raised on all of them.
    """
    if process_group is not None:
        from . import ranks

        return ranks.detect(
            process_group,
            lambda: (_detect(device, precision=precision), _named(device, precision)[0]),
            lambda plan: choice.has_scaler(*_scaler_of(plan.hardware)),
            choice.choose,
        )
    key = (device, precision)
    try:
        plan, backend, index = _cache[key]
    except (KeyError, TypeError):
        pass
    else:
        if backend is None or _current_index(backend) == index:
            return plan
    before = generation()
    plan, warning, backend = _resolve(device, precision)
    told = (plan.device.type, plan.hardware.name, plan.dtype)
    if warning and told not in _warned:
        if len(_warned) >= _MOST:
            _warned.clear()
        warn(warning, PrecisionWarning)
        _warned.add(told)
    index = None if backend is None else _current_index(backend)
    # Not an answer that the registry overtook, and not one about a described machine: there is no
    # end to descriptions.
    if before == generation() and not isinstance(device, Hardware):
        if len(_cache) >= _MOST:
            _cache.clear()
        _cache[key] = (plan, backend, index)
    return plan


_detect.__name__ = _detect.__qualname__ = "detect"
_detect.cache_clear = _cache_clear  # type: ignore[attr-defined]
detect = cast(_Detect, _detect)
registry.on_change(_cache_clear)


private.not_as_frames(__name__)
