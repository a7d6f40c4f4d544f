"""``amphal.autocast``, ``custom_fwd`` and ``custom_bwd``: the front end over torch's state.

A region is a subclass of ``torch.autocast``, because Dynamo and export know instances of that class
and nothing else. It keeps no state on itself: what it found on enter lies on a stack of the thread
that entered, so one region can be re-entered, recurse and be shared between threads.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch

from . import _compat, _detect, _install, _registry
from ._backend import LOW_PRECISION, Hardware
from ._detect import DeviceLike, Plan, PrecisionLike
from ._oplists import OpLists
from .errors import ArgumentError, ArgumentTypeError, RegionStateError

__all__ = [
    "Region",
    "autocast",
    "cast",
    "custom_bwd",
    "custom_fwd",
    "decorate",
    "innermost",
    "push_delegate",
    "settled",
]

_F = TypeVar("_F", bound=Callable[..., Any])

_is_enabled = torch.is_autocast_enabled
_set_enabled = torch.set_autocast_enabled
_get_dtype = torch.get_autocast_dtype
_set_dtype = torch.set_autocast_dtype
_enter_nesting = torch.autocast_increment_nesting
_exit_nesting = torch.autocast_decrement_nesting
_clear_cache = torch.clear_autocast_cache
_is_cache_enabled = torch.is_autocast_cache_enabled
_set_cache_enabled = torch.set_autocast_cache_enabled
_function_mode_on = _compat.function_mode_enabled
_is_compiling = torch.compiler.is_compiling


class _Entry(NamedTuple):
    """What one entry of a region found, to be put back when it is left; None: left as it was."""

    region: Region
    enabled: bool | None
    dtype: torch.dtype | None
    cache: bool | None
    nested: bool
    """An entry below keeps torch's nesting count above zero, so this one did not count."""
    delegate: torch.autocast | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Entry] = []


_thread = _Thread()
_new_entry = tuple.__new__


def innermost() -> Region:
    """The innermost region that this thread is in."""
    return _thread.stack[-1].region


def push_delegate(region: Region, delegate: torch.autocast) -> None:
    """Note that ``region`` has been entered by entering ``delegate``; leaving it leaves that."""
    _thread.stack.append(_Entry(region, None, None, None, False, delegate))


class Region(torch.autocast):
    """One validated autocast region; made by :func:`autocast`, entered as often as you like.

    The attributes are the ones that ``torch.autocast`` has and that other libraries read.
    """

    def __init__(
        self, device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool | None
    ) -> None:
        # torch's own __init__ checks again and, for an absent device, warns and turns itself off.
        self.device = device_type
        self.fast_dtype = dtype
        self._enabled = enabled
        self._cache_enabled = cache_enabled  # type: ignore[assignment]  # None: as it is on enter
        self.custom_backend_name = _compat.privateuse1_name()

    def __enter__(self) -> Region:
        stack = _thread.stack
        if _function_mode_on():
            return self._enter_delegate(stack)
        device = self.device
        found_enabled = found_dtype = found_cache = None
        nested = bool(stack)
        try:
            if not nested:
                _enter_nesting()
            if self._enabled:
                dtype = _get_dtype(device)
                if dtype is not self.fast_dtype:
                    _set_dtype(device, self.fast_dtype)
                    found_dtype = dtype
                    # torch's cache of cast weights is keyed by the weight alone: casts made for
                    # the surrounding region's dtype must not meet this one's inputs.
                    _clear_cache()
            enabled = _is_enabled(device)
            if enabled is not self._enabled:
                _set_enabled(device, self._enabled)
                found_enabled = enabled
            if self._cache_enabled is not None:
                cache = _is_cache_enabled()
                if cache is not self._cache_enabled:
                    _set_cache_enabled(self._cache_enabled)
                    found_cache = cache
            # Made without NamedTuple's own constructor, which costs as much as the rest.
            stack.append(
                _new_entry(_Entry, (self, found_enabled, found_dtype, found_cache, nested, None))
            )
        except BaseException:
            self._restore(found_enabled, found_dtype, found_cache, nested)
            raise
        return self

    def __exit__(
        self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None
    ) -> Literal[False]:
        stack = _thread.stack
        if stack and stack[-1][0] is self:
            _, enabled, dtype, cache, nested, delegate = stack.pop()
        else:
            _, enabled, dtype, cache, nested, delegate = self._take_from_below(stack)
        if delegate is not None:
            delegate.__exit__(exc_type, exc_val, exc_tb)
            if dtype is not None:
                _clear_cache()
        else:
            self._restore(enabled, dtype, cache, nested)
        return False

    def _restore(
        self,
        enabled: bool | None,
        dtype: torch.dtype | None,
        cache: bool | None,
        nested: bool,
    ) -> None:
        if not nested and _exit_nesting() == 0:
            _clear_cache()
        if enabled is not None:
            _set_enabled(self.device, enabled)
        if dtype is not None:
            _set_dtype(self.device, dtype)
            _clear_cache()
        if cache is not None:
            _set_cache_enabled(cache)

    def _enter_delegate(self, stack: list[_Entry]) -> Region:
        # Under a function mode (export's pre-dispatch tracing is one) torch's own object must be
        # the one that enters: it records itself in the graph. A new one each time, since it keeps
        # its state on itself.
        delegate = _compat.plain_autocast(
            self.device, self.fast_dtype, self._enabled, self._cache_enabled
        )
        dtype = _get_dtype(self.device)
        changed = None if dtype is self.fast_dtype else dtype
        if changed is not None:
            _clear_cache()
        delegate.__enter__()  # type: ignore[no-untyped-call]
        stack.append(_Entry(self, None, changed, None, False, delegate))
        return self

    def _take_from_below(self, stack: list[_Entry]) -> _Entry:
        """Take this region's entry from below the top, handing what it would restore to the next.

        Happens when a suspended generator holds a region: regions end in another order than they
        began. What a region above would restore to becomes what this one had found.
        """
        at = next((i for i in reversed(range(len(stack))) if stack[i].region is self), None)
        if at is None:
            raise RegionStateError(
                f"an autocast region of {self.device!r} was left in a thread that had not entered "
                "it; enter and leave a region in the same thread (use 'with')"
            )
        entry = stack.pop(at)
        if entry.delegate is not None:
            return entry
        if not entry.nested:
            stack[at] = stack[at]._replace(nested=False)
            entry = entry._replace(nested=True)
        if entry.cache is not None:
            stack[at] = stack[at]._replace(cache=entry.cache)
            entry = entry._replace(cache=None)
        above = range(at, len(stack))
        same = next((i for i in above if stack[i].region.device == self.device), None)
        if same is not None:
            found = {n: getattr(entry, n) for n in ("enabled", "dtype")}
            handed = {n: value for n, value in found.items() if value is not None}
            stack[same] = stack[same]._replace(**handed)
            entry = entry._replace(enabled=None, dtype=None)
        return entry

    def __call__(self, func: _F) -> _F:
        """Decorate ``func``: a function, a coroutine function or a generator function."""
        if not callable(func):
            raise ArgumentTypeError(
                f"autocast(...)(func) decorates a callable, got {type(func).__name__}; "
                "to use it as a context manager, write: with amphal.autocast(...):"
            )
        return decorate(func, lambda: self)

    def __repr__(self) -> str:
        name = str(self.fast_dtype).removeprefix("torch.") if self._enabled else "disabled"
        return f"<amphal.autocast {self.device} {name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Region, (self.device, self.fast_dtype, self._enabled, self._cache_enabled)


def _drive(steps: Any, region: Callable[[], torch.autocast]) -> Generator[Any, Any, Any]:
    """Run a generator or coroutine with the region around each step and never while suspended."""
    resume, argument = steps.send, None
    while True:
        try:
            with region():
                value = resume(argument)
        except StopIteration as stop:
            return stop.value
        try:
            argument = yield value
            resume = steps.send
        except GeneratorExit:
            with region():
                steps.close()
            raise
        except BaseException as exc:
            resume, argument = steps.throw, exc


class _Driven:
    """An awaitable, driven step by step."""

    def __init__(self, steps: Any, region: Callable[[], torch.autocast]) -> None:
        self._steps, self._region = steps, region

    def __await__(self) -> Generator[Any, Any, Any]:
        return _drive(self._steps, self._region)


def decorate(func: _F, region: Callable[[], torch.autocast]) -> _F:
    wrapper: Callable[..., Any]
    if inspect.isasyncgenfunction(func):

        @functools.wraps(func)
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            steps = func(*args, **kwargs)
            step = steps.asend(None)
            while True:
                try:
                    value = await _Driven(step.__await__(), region)
                except StopAsyncIteration:
                    return
                try:
                    step = steps.asend((yield value))
                except GeneratorExit:
                    await _Driven(steps.aclose().__await__(), region)
                    raise
                except BaseException as exc:
                    step = steps.athrow(exc)

    elif inspect.iscoroutinefunction(func):

        @functools.wraps(func)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await _Driven(func(*args, **kwargs), region)

    elif inspect.isgeneratorfunction(func):

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return (yield from _drive(func(*args, **kwargs), region))

    else:

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with region():
                return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


_regions: dict[tuple[object, object, bool, bool | None], Region] = {}
_detect.on_clear(_regions.clear)

_Device = DeviceLike | Plan | None


@overload
def autocast(device_type: _F, /) -> _F: ...
@overload
def autocast(
    device_type: _Device = None,
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
    if enabled is True or enabled is False:
        try:
            return _regions[device_type, dtype, enabled, cache_enabled]
        except (KeyError, TypeError):
            pass
    return _build(device_type, dtype, enabled, cache_enabled)


def _policy_region(device: Any, dtype: Any, enabled: Any, cache_enabled: Any, ops: Any) -> Any:
    from . import _policy_region as module

    if _is_compiling():
        return module.traced(device, dtype, enabled, cache_enabled, ops)
    return module.build(device, dtype, enabled, cache_enabled, ops)


def _build(device_type: Any, dtype: Any, enabled: Any, cache_enabled: Any) -> Any:
    """Validate once; the next call with these arguments finds the region made here."""
    if callable(device_type) and not isinstance(device_type, torch.nn.Module):
        if dtype is None and enabled is True and cache_enabled is None:
            return decorate(device_type, autocast)
        raise ArgumentTypeError(
            "autocast() got a function and other arguments; write "
            "@amphal.autocast(dtype=...), which decorates the function below it"
        )
    device, low, on = settled(device_type, dtype, enabled, cache_enabled)
    key = (device, low, on, cache_enabled)
    region = _regions.get(key)
    if region is None:
        region = _regions[key] = Region(device, low, on, cache_enabled)
    if isinstance(device_type, Plan) or (device_type is not None and dtype is not None):
        # Only answers that the environment has no part in.
        _regions[device_type, dtype, enabled, cache_enabled] = region
    return region


def _traced(device_type: Any, dtype: Any, enabled: Any, cache_enabled: Any) -> Any:
    """The same region as torch's own object, which is what Dynamo and export understand."""
    if isinstance(device_type, Plan):
        dtype = device_type.dtype if dtype is None else dtype
        device_type = device_type.device.type
    elif isinstance(device_type, torch.device):
        device_type = device_type.type
    elif callable(device_type):
        return decorate(device_type, autocast)
    device, low, on = _settled_constant(device_type, dtype, enabled, cache_enabled)
    return torch.autocast(device, dtype=low, enabled=on, cache_enabled=cache_enabled)


def settled(
    device: Any, dtype: Any, enabled: Any, cache_enabled: Any
) -> tuple[str, torch.dtype, bool]:
    """Every check of :func:`autocast`'s arguments; the device type, the low dtype and on."""
    _check_flags(enabled, cache_enabled)
    return _settle(device, dtype, enabled)


_settled_constant = _compat.constant_in_graphs(settled)


def _check_flags(enabled: object, cache_enabled: object) -> None:
    if not isinstance(enabled, bool):
        raise ArgumentTypeError(
            f"enabled must be True or False, got {type(enabled).__name__} ({enabled!r})"
        )
    if cache_enabled is not None and not isinstance(cache_enabled, bool):
        raise ArgumentTypeError(
            "cache_enabled must be True, False or None (as it is on enter), "
            f"got {type(cache_enabled).__name__} ({cache_enabled!r})"
        )


def _settle(device: Any, dtype: Any, enabled: bool) -> tuple[str, torch.dtype, bool]:
    """The device type, the low dtype and whether autocast is on; every check is made here."""
    precision = None if dtype is None else _detect.named_precision(dtype, what="dtype")
    if isinstance(device, Plan):
        device_type = device.device.type
        precision = device.dtype if precision is None else precision
        if device.support[precision].level == "absent":
            _detect.detect(device.device, precision=precision)
    elif not enabled and device is not None:
        # "Off" asks nothing of the device, so it may be absent; it must be a device all the same.
        if isinstance(device, Hardware):
            raise _no_hardware(device)
        device_type, _ = _detect.named_device(device, what="device_type")
        device_type = _registry.get_backend(device_type).device_type
    else:
        if isinstance(device, Hardware):
            raise _no_hardware(device)
        if device is not None:
            device = _torch_device_string(*_detect.named_device(device, what="device_type"))
        plan = _detect.detect(device, precision="auto" if precision is None else precision)
        device_type = plan.device.type
        precision = plan.dtype
    if not _compat.autocast_available(device_type):
        raise ArgumentError(
            f"torch has no autocast for device type {device_type!r}; "
            "a region on it could change nothing"
        )
    on = enabled and precision in LOW_PRECISION
    if precision not in LOW_PRECISION:
        precision = _get_dtype(device_type)
    if on:
        _install.ensure_kernels(device_type, precision)
    return device_type, precision, on


def _torch_device_string(device_type: str, index: int | None) -> str:
    return device_type if index is None else f"{device_type}:{index}"


def _no_hardware(hardware: Hardware) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"autocast() runs on a device that is here, and {hardware.name!r} is a description; "
        "pass a device, or ask amphal.detect() about the description"
    )


def _device_types(values: Any, found: dict[str, None]) -> dict[str, None]:
    """The device types of all tensors in nested arguments, in order of appearance."""
    if isinstance(values, torch.Tensor):
        found[values.device.type] = None
    elif isinstance(values, dict):
        for value in values.values():
            _device_types(value, found)
    elif isinstance(values, (list, tuple)):
        for value in values:
            _device_types(value, found)
    return found


def cast(value: Any, devices: tuple[str, ...], dtype: torch.dtype) -> Any:
    """Cast floating-point tensors (float64 aside) that lie on ``devices``, in containers too."""
    if isinstance(value, torch.Tensor):
        eligible = (
            value.is_floating_point()
            and value.dtype is not torch.float64
            and value.device.type in devices
        )
        return value.to(dtype) if eligible else value
    if isinstance(value, dict):
        return {k: cast(v, devices, dtype) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [cast(v, devices, dtype) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


# What a decorated forward leaves on ctx: (device type, whether autocast was on, its dtype) each.
_STATE = "_amphal_autocast"


@overload
def custom_fwd(fwd: _F, /) -> _F: ...
@overload
def custom_fwd(
    *, device_type: str | torch.device | None = None, cast_inputs: PrecisionLike | None = None
) -> Callable[[_F], _F]: ...
def custom_fwd(
    fwd: Any = None,
    *,
    device_type: str | torch.device | None = None,
    cast_inputs: PrecisionLike | None = None,
) -> Any:
    """Decorate ``forward`` of a ``torch.autograd.Function``; the device is found from its inputs.

    Args:
        device_type: the device type to follow; None for those of the tensors that come in.
        cast_inputs: in an autocast region, cast floating-point inputs (float64 aside) to this
            dtype and run ``forward`` with autocast off. Outside one it has no effect.

    Pair it with :func:`custom_bwd`, which runs ``backward`` in the state that ``forward`` had.
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    if not callable(fwd):
        raise ArgumentTypeError(f"custom_fwd decorates a function, got {type(fwd).__name__}")
    named = None if device_type is None else _detect.named_device(device_type, "device_type")[0]
    if named is not None and not _compat.autocast_available(named):
        raise ArgumentError(f"torch has no autocast for device type {named!r}")
    target = _cast_dtype(cast_inputs)

    @functools.wraps(fwd)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        types = {named: None} if named else _device_types((args, kwargs), {})
        available = [t for t in types if _compat.autocast_available(t)]
        state = tuple((t, _is_enabled(t), _get_dtype(t)) for t in available)
        on = tuple(t for t, enabled, _ in state if enabled)
        if target is not None and on:
            state = tuple((t, False, dtype) for t, _, dtype in state)
        setattr(ctx, _STATE, state)
        _leave_torchs_marks(ctx, state)
        if target is None or not on:
            return fwd(ctx, *args, **kwargs)
        args, kwargs = cast(args, on, target), cast(kwargs, on, target)
        return _run_under(tuple((t, False, _get_dtype(t)) for t in on), fwd, ctx, args, kwargs)

    return forward


def _cast_dtype(cast_inputs: Any) -> torch.dtype | None:
    # Any floating dtype, as torch allows: float64 is a sensible one to compute in.
    if cast_inputs is None or (
        isinstance(cast_inputs, torch.dtype) and cast_inputs.is_floating_point
    ):
        return cast_inputs
    return _detect.named_precision(cast_inputs, what="cast_inputs")


def _leave_torchs_marks(ctx: Any, state: tuple[tuple[str, bool, torch.dtype], ...]) -> None:
    """What ``torch.amp.custom_bwd`` reads, should it decorate the backward."""
    _, enabled, dtype = next((s for s in state if s[1]), state[0] if state else ("", False, None))
    ctx._fwd_used_autocast = enabled
    ctx._dtype = dtype


def _run_under(
    state: tuple[tuple[str, bool, Any], ...], func: Any, ctx: Any, args: Any, kwargs: Any
) -> Any:
    """``func(ctx, *args, **kwargs)`` in this autocast state, device by device."""
    if not state:
        return func(ctx, *args, **kwargs)
    device, enabled, dtype = state[0]
    if _is_compiling():
        region: torch.autocast = torch.autocast(device, dtype=dtype, enabled=enabled)
    else:
        region = Region(device, dtype, enabled, None)
    with region:
        return _run_under(state[1:], func, ctx, args, kwargs)


@overload
def custom_bwd(bwd: _F, /) -> _F: ...
@overload
def custom_bwd(*, device_type: str | torch.device | None = None) -> Callable[[_F], _F]: ...
def custom_bwd(bwd: Any = None, *, device_type: str | torch.device | None = None) -> Any:
    """Decorate ``backward`` of a ``torch.autograd.Function``: it runs in ``forward``'s state.

    Args:
        device_type: accepted for torch's sake and not needed with :func:`custom_fwd`. It names the
            device where ``forward`` was decorated by ``torch.amp.custom_fwd``.
    """
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    if not callable(bwd):
        raise ArgumentTypeError(f"custom_bwd decorates a function, got {type(bwd).__name__}")
    named = None if device_type is None else _detect.named_device(device_type, "device_type")[0]

    @functools.wraps(bwd)
    def backward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(ctx, _STATE):
            state = getattr(ctx, _STATE)
        elif hasattr(ctx, "_fwd_used_autocast"):
            types = [named] if named else list(_device_types((args, kwargs), {}))
            state = tuple((t, ctx._fwd_used_autocast, ctx._dtype) for t in types[:1])
        else:
            raise RegionStateError(
                "custom_bwd found no state of the forward pass on ctx; "
                "decorate forward with @amphal.custom_fwd"
            )
        return _run_under(state, bwd, ctx, args, kwargs)

    return backward
