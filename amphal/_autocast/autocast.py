"""``amphal.autocast``: the front end over torch's autocast state.

A region is a subclass of ``torch.autocast``, because Dynamo and export know instances of that class
and nothing else. It keeps no state on itself: what it found on enter lies on a stack of the thread
that entered, so one region can be re-entered, recurse and be shared between threads.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from .._torch import private
from ..errors import ArgumentTypeError
from .decorator import decorate
from .region import Region, _is_compiling, _owners

if TYPE_CHECKING:
    from .._choice import Choice
    from ..contract import DeviceLike, OpLists, PrecisionLike


_F = TypeVar("_F", bound=Callable[..., Any])


_Arguments = tuple[object, object, bool, bool | None]
_regions: dict[_Arguments, Region] = {}
_chosen: dict[_Arguments, tuple[object, Region]] = {}
"""For arguments that leave something to detect(): the plan then chosen, and its region."""
_MOST = 512


@functools.cache
def _settling() -> Any:
    """What validates arguments, loaded when the first region is made: importing stays cheap."""
    from .._torch import drop_casts_after_each_step
    from . import arguments

    drop_casts_after_each_step()
    arguments.on_clear(_forget)
    return arguments


def _forget() -> None:
    _regions.clear()
    _chosen.clear()


@overload
def autocast(device_type: _F, /) -> _F: ...
@overload
def autocast(
    device_type: DeviceLike | Choice | None = None,
    dtype: PrecisionLike | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    *,
    ops: Mapping[str, str] | OpLists | None = None,
) -> Region: ...
def autocast(
    device_type: Any = None,
    dtype: PrecisionLike | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    *,
    ops: Mapping[str, str] | OpLists | None = None,
) -> Any:
    """A mixed-precision region: a context manager, and a decorator, bare or called.

    The order of arguments is that of ``torch.autocast``, and so is the type: an instance of it.

    Args:
        device_type: a device type or device (``"cuda"``, ``"cuda:0"``, ``torch.device``), a
            :class:`Plan`, or None for the device that :func:`detect` chooses.
        dtype: ``"bf16"``, ``"fp16"``, ``"fp32"``, one of those torch dtypes, or None for the
            plan's. float32 means that this region is full precision, on every device.
        enabled: False switches autocast off in the region.
        cache_enabled: keep the casts of weights until the outermost region ends; None leaves it
            as it is on enter (on, in torch).
        ops: the casting policy of this region and thread: op names (``"softmax"``, all overloads,
            or ``"softmax.int"``) to ``"lower_precision"``, ``"fp32"``, ``"promote"`` or
            ``"as_is"``, over the device's own policy and that of a surrounding region; or a whole
            :class:`OpLists`, in place of them.

    A region restores what it found when it was entered, in the thread that entered it. A decorated
    generator or coroutine has the region while it runs and not while it is suspended. A decorator
    without a device chooses at the first call when bare, and at decoration when called.

    Raises:
        UnknownDeviceError, DeviceNotAvailableError: no such device, or not here.
        UnsupportedPrecisionError: the device cannot do this dtype.
        ArgumentError, ArgumentTypeError: anything else that is no device, dtype or bool.
    """
    if ops is not None:
        return _policy_region(device_type, dtype, enabled, cache_enabled, ops)
    if _is_compiling():
        return _traced(device_type, dtype, enabled, cache_enabled)
    # By identity: equal keys such as 1 are no flags, and must not find what True has left here.
    if (enabled is True or enabled is False) and (
        cache_enabled is None or cache_enabled is True or cache_enabled is False
    ):
        key = device_type, dtype, enabled, cache_enabled
        try:
            region = _regions.get(key)
            if region is None and key in _chosen:
                plan, region = _chosen[key]
                # The current device has a part in this answer: it holds while detect() gives it.
                if _settling().planned(device_type, dtype) is not plan:
                    region = None
        except TypeError:  # not hashable; what is wrong with it is said below
            region = None
        if region is not None:
            return region
    return _build(device_type, dtype, enabled, cache_enabled)


def _policy_region(device: Any, dtype: Any, enabled: Any, cache_enabled: Any, ops: Any) -> Any:
    from . import policy_region as module

    if _is_compiling():
        return module.traced(device, dtype, enabled, cache_enabled, ops)
    return module.build(device, dtype, enabled, cache_enabled, ops)


def _build(device_type: Any, dtype: Any, enabled: Any, cache_enabled: Any) -> Any:
    """Validate once; the next call with these arguments finds the region made here."""
    if _is_function(device_type):
        if dtype is None and enabled is True and cache_enabled is None:
            return decorate(device_type, autocast)
        raise ArgumentTypeError(
            "autocast() got a function and other arguments; write "
            "@amphal.autocast(dtype=...), which decorates the function below it"
        )
    settling = _settling()
    before = settling.generation()
    device, low, on = settling.settled(device_type, dtype, enabled, cache_enabled)
    key = (device, low, on, cache_enabled)
    region = _regions.get(key) or Region(device, low, on, cache_enabled)
    if before == settling.generation():  # else it was settled for a registry that has changed
        if len(_regions) + len(_chosen) >= _MOST:
            _forget()
        _regions[key] = region
        if settling.independent(device_type, dtype):
            _regions[device_type, dtype, enabled, cache_enabled] = region
        elif enabled:
            plan = settling.planned(device_type, dtype)
            _chosen[device_type, dtype, enabled, cache_enabled] = plan, region
    return region


def _is_function(value: Any) -> bool:
    """Something that a bare decorator was put on; a module was more likely meant for a device."""
    return isinstance(value, classmethod) or (
        callable(value) and not isinstance(value, torch.nn.Module)
    )


def _traced(device_type: Any, dtype: Any, enabled: Any, cache_enabled: Any) -> Any:
    """The same region as torch's own object, which is what Dynamo and export understand."""
    if _owners and enabled:
        return contextlib.nullcontext()
    from .._choice import Choice

    if isinstance(device_type, Choice):
        dtype = device_type.dtype if dtype is None else dtype
        device_type = device_type.device.type
    elif isinstance(device_type, torch.device):
        device_type = device_type.type
    elif callable(device_type):
        return decorate(device_type, autocast)
    device, low, on = _settled_constant(device_type, dtype, enabled, cache_enabled)
    return torch.autocast(device, dtype=low, enabled=on, cache_enabled=cache_enabled)


@private.constant_in_graphs
def _settled_constant(
    device: Any, dtype: Any, enabled: Any, cache_enabled: Any
) -> tuple[str, torch.dtype, bool]:
    found: tuple[str, torch.dtype, bool] = _settling().settled(
        device, dtype, enabled, cache_enabled
    )
    return found


private.not_as_frames(__name__)
