"""Every use of a private torch or CPython name, in one place, with its reason.

Each was checked on torch 2.6, 2.8, 2.9, 2.13 and 2.14. Where one is missing, the message says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import CodeType
from typing import Any, TypeVar

import torch

from ..errors import TorchTooOldError

__all__ = [
    "autocast_available",
    "constant_in_graphs",
    "foreach_devices",
    "function_mode_enabled",
    "is_fsdp1_shard",
    "plain_autocast",
    "privateuse1_name",
    "takes_numbers",
    "torch_version",
]

_F = TypeVar("_F", bound=Callable[..., Any])


def _private(name: str) -> Any:
    if not hasattr(torch._C, name):
        raise TorchTooOldError(
            f"torch {torch.__version__} has no torch._C.{name}, which amphal needs; "
            "use a torch that this amphal supports (2.6 to 2.14), or a newer amphal"
        )
    return getattr(torch._C, name)


# A function mode may be export's tracing mode, which must see torch's own region being entered.
# There is no public query.
function_mode_enabled: Callable[[], bool] = _private("_is_torch_function_mode_enabled")

# The name that a third-party device took for itself; torch.autocast keeps it as an attribute.
privateuse1_name: Callable[[], str] = _private("_get_privateuse1_backend_name")


def is_fsdp1_shard(param: torch.Tensor) -> bool:
    """Whether FSDP1 has flattened this parameter, or made it of flattened ones.

    It marks both, and with ``use_orig_params=True`` the mark is all that tells them from others.
    Checked on 2.13 alone; where the mark is missing, nothing is refused.
    """
    return bool(getattr(param, "_fsdp_flattened", False))


def torch_version() -> tuple[int, int]:
    """The torch that runs, as ``(major, minor)``."""
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(re.match(r"\d+", minor)[0])  # type: ignore[index]


def constant_in_graphs(func: _F) -> _F:
    """Let Dynamo call ``func`` while it traces and take the result as a constant.

    ``torch.compiler.assume_constant_result`` sets this same attribute, but imports Dynamo to do
    so, which costs a second at import.
    """
    func._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return func


@constant_in_graphs
def autocast_available(device_type: str) -> bool:
    """Whether torch has an autocast state for this device type.

    ``torch.amp.is_autocast_available`` raises for a name that torch does not know instead of
    answering no.
    """
    try:
        return torch.amp.is_autocast_available(device_type)
    except RuntimeError:
        return False


@functools.cache
def foreach_devices() -> frozenset[str]:
    """The device types whose foreach ops are real kernels; elsewhere they are loops over tensors.

    Only speed hangs on the answer, so a torch without this list gets an empty one.
    """
    try:
        from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
    except ImportError:  # pragma: no cover - not in any torch from 2.6 to 2.14
        return frozenset()
    return frozenset(_get_foreach_kernels_supported_devices())


def lower_nesting(level: int) -> None:
    """Bring this thread's autocast nesting count down to ``level``; at 0 the cache ends."""
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > level:
        pass
    if level == 0:
        torch.clear_autocast_cache()


def plain_autocast(
    device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool | None
) -> torch.autocast:
    """torch's own region, already validated: for "cuda" its constructor would ask again."""
    region = torch.autocast(device_type, dtype=dtype, enabled=False, cache_enabled=cache_enabled)
    region._enabled = enabled
    return region


def autocast_key(device_type: str) -> str:
    """The name of a device type's autocast dispatch key, such as ``"AutocastXPU"``."""
    if device_type == privateuse1_name():
        return "AutocastPrivateUse1"
    return f"Autocast{device_type.upper()}"


TORCHS_OWN_AUTOCAST = frozenset(
    f"Autocast{name}" for name in ("CPU", "CUDA", "MAIA", "MPS", "MTIA", "XPU")
)
"""The keys that torch itself fills with casts (2.6 to 2.14: autocast_mode.cpp); the others are left
to extensions."""


def schema_exists(qualified_name: str) -> bool:
    """Whether the dispatcher has a definition of this overload, and not only kernels for it.

    An extension may register kernels for the ops of another extension, which is not loaded.
    """
    name, _, overload = qualified_name.partition(".")
    try:
        # The dispatcher's own answer: TorchScript has overloads of its own, with no kernels.
        _private("_dispatch_find_schema_or_throw")(name, overload)
    except RuntimeError:
        return False
    return not qualified_name.endswith(".")


def all_op_names() -> list[str]:
    """Every overload that the dispatcher knows, such as ``"aten::softmax.int"``."""
    return list(_private("_dispatch_get_all_op_names")())


def registered_ops(dispatch_key: str) -> frozenset[str]:
    """The overloads that have a kernel of their own under this dispatch key."""
    return frozenset(_private("_dispatch_get_registrations_for_dispatch_key")(dispatch_key))


def has_fallthrough(dispatch_key: str) -> bool:
    """Whether ops without a kernel of their own pass through this dispatch key."""
    # An op that casts nowhere, so what the table shows for it is what stands for all.
    table = _private("_dispatch_dump_table")("aten::detach").splitlines()
    return any("fallthrough" in line for line in table if line.startswith(f"{dispatch_key}:"))


# A device in pure Python, for tests: torch calls it experimental, and has it from 2.10 on.
META_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)


def why_no_python_device() -> str:
    """Why this torch cannot have a device in pure Python; empty if it can."""
    from torch.utils import backend_registration

    if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return ""
    return f"it needs torch 2.10 or newer, and this is {torch.__version__}"


def setup_python_device(name: str, module: Any) -> None:
    """Give torch's slot for third-party devices this name, with hooks and a device guard."""
    from torch.utils import backend_registration

    backend_registration._setup_privateuseone_for_python_backend(name, module)


def empty_device_tensor(dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of the third-party device, with a storage of its own."""
    return torch._C._acc.create_empty_tensor((0,), dtype)


def has_kernel(qualified_name: str, dispatch_key: str) -> bool:
    """Whether the op has a kernel of its own under this dispatch key now."""
    answer = _private("_dispatch_has_kernel_for_dispatch_key")(qualified_name, dispatch_key)
    return bool(answer)


def after_key(dispatch_key: str) -> Any:
    """The set of all dispatch keys behind this one, for calling on past it."""
    return _private("_dispatch_keyset_full_after")(_private("_dispatch_key_parse")(dispatch_key))


# Ops whose function in torch takes exactly the schema's arguments. Not so for losses (``reduction``
# is "none" where the schema says "mean"), convolutions and some written by hand.
_GENERATED = frozenset(
    """
    addmm baddbmm batch_norm bmm cat cosine_similarity cumprod cumsum einsum exp expm1 group_norm
    layer_norm log log1p log_softmax.int logsumexp matmul mm mv native_layer_norm pow.Scalar
    pow.Tensor_Scalar pow.Tensor_Tensor prelu prod prod.dim_int reciprocal rms_norm rsqrt
    softmax.int stack sum sum.dim_IntList
    """.split()
)


def caller(op: Any) -> Callable[..., Any]:
    """``op`` for positional and keyword arguments as in its schema, as fast as Python can call it.

    The functions that torch generates from the schemas parse arguments in half the time of an
    OpOverload.
    """
    name = op._name.removeprefix("aten::")
    if name not in _GENERATED:
        return op._op  # type: ignore[no-any-return]
    return getattr(torch._C._VariableFunctions, name.split(".")[0])  # type: ignore[no-any-return]


def is_on(device_type: str) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor is on this device type. ``tensor.device.type`` takes four times as long."""
    found = getattr(torch.Tensor, f"is_{device_type}", None)
    if hasattr(found, "__get__"):
        return found.__get__  # type: ignore[no-any-return, union-attr]
    return lambda tensor: tensor.device.type == device_type


def kernel_library(namespace: str) -> Any:
    """Holds kernels: ``impl(name, key, kernel, True)`` adds one, ``reset()`` takes all away.

    What ``torch.library.Library`` does, at a third of the time: a region pays this when it is
    entered. The kernel is called as ``kernel(keyset, *args, **kwargs)``.
    """
    return _private("_dispatch_library")("IMPL", namespace, "", __file__, 0)


def kernel_handle(qualified_name: str, dispatch_key: str) -> Any:
    """The kernel that is on this key now: callable, and alive as long as the handle. Or None.

    Handles came with torch 2.9 (``torch.library.get_kernel``).
    """
    get_kernel = getattr(torch.library, "get_kernel", None)
    return None if get_kernel is None else get_kernel(qualified_name, dispatch_key)


def redispatcher(op: Any) -> Callable[..., Any]:
    """``(keyset, *args, **kwargs)``: call ``op`` from a kernel with this set of keys left."""
    return op._handle.redispatch_boxed  # type: ignore[no-any-return]


def takes_numbers(op: Any) -> bool:
    """Whether Python numbers may stand for tensors in calls of ``op``, as in ``x * 2.0``.

    Private; checked on 2.6 and 2.13. Where it is missing, true: the slower way is right for all.
    """
    check = getattr(torch._C, "_should_allow_numbers_as_tensors", None)
    name = op._name.removeprefix("aten::").split(".")[0]
    return check is None or bool(check(name))


@functools.cache
def marker_devices() -> dict[str, torch.dtype]:
    """Device types of which this process can have no tensors, with their autocast dtypes.

    Dynamo guards on the autocast state of every device type that torch knows, and a compiled
    function must not run under another policy than the one it was compiled for. So the policy in
    force is written into the autocast state of device types that are not there: it changes no op.
    Nobody else writes there, so what is found here once is what is put back.
    """
    found = {}
    for name in ("ipu", "maia"):
        try:
            dtype = torch.get_autocast_dtype(name)
        except RuntimeError:  # this torch does not know it
            continue
        if not has_kernel("aten::empty.memory_format", name.upper()):
            found[name] = dtype
    return found


@functools.cache
def all_dtypes() -> tuple[torch.dtype, ...]:
    """Every dtype of this torch, in one order."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return tuple(sorted(found, key=str))


def allow_in_graph(func: Callable[..., Any]) -> None:
    """Let Dynamo put calls of ``func`` in its graphs, and keep them although they give nothing.

    Called while Dynamo traces, since it would cost a second of import before that.
    """
    torch.compiler.allow_in_graph(func)  # type: ignore[no-untyped-call]
    torch.fx.node.has_side_effect(func)


def take_mode_off(mode: Any) -> None:
    """Leave a function mode, even one below others. A mode's own exit takes off the uppermost."""
    stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if not any(entry is mode for entry in stack):
        return
    pop, push = _private("_pop_torch_function_stack"), _private("_push_on_torch_function_stack")
    above = []
    while (entry := pop()) is not mode:
        above.append(entry)
    for entry in reversed(above):
        push(entry)


def being_exported() -> bool:
    """Whether ops are being recorded by ``torch.export``, which happens before autocast."""
    if not function_mode_enabled():
        return False
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, PreDispatchTorchFunctionMode) for mode in modes)


def dispatch_state() -> tuple[Any, Any]:
    """The dispatch keys that this thread includes and excludes, for :func:`in_dispatch_state`."""
    return (
        _private("_dispatch_tls_local_include_set")(),
        _private("_dispatch_tls_local_exclude_set")(),
    )


def in_dispatch_state(state: tuple[Any, Any]) -> Any:
    """A context in which the thread includes and excludes exactly these dispatch keys."""
    return _private("_ForceDispatchKeyGuard")(*state)


@contextlib.contextmanager
def past_the_recorder() -> Iterator[None]:
    """Ops are neither recorded by ``torch.export`` nor by autograd here, but autocast works."""
    keys = _private("DispatchKeySet")(_private("_dispatch_key_parse")("PreDispatch"))
    keys = keys.add(_private("_dispatch_key_parse")("ADInplaceOrView"))
    with _private("_ExcludeDispatchKeyGuard")(keys), _private("_AutoDispatchBelowAutograd")():
        yield


def is_composite(op: Any) -> bool:
    """Whether the op is made of other ops, for autograd too, so that it can be decomposed."""
    return has_kernel(op.name(), "CompositeImplicitAutograd")


@functools.cache
def dynamo_guards_on_autocast() -> bool:
    """Whether compiled functions are bound to the autocast state of every device type.

    They are from torch 2.8 at the latest; on 2.6 a policy must show itself in another way.
    """
    from torch._C._dynamo.guards import GlobalStateGuard

    device = next(iter(marker_devices()))
    guard = GlobalStateGuard()
    enabled = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, not enabled)
    try:
        return not guard.check()
    finally:
        torch.set_autocast_enabled(device, enabled)


class _Found(threading.local):
    setting: Any = None


_found = _Found()
_off_lock = threading.Lock()
_off_before: list[Any] = []


@functools.cache
def _graph_cache_setting() -> tuple[Any, Any]:
    config: Any = importlib.import_module("torch._functorch.config")
    return config, config._config["enable_autograd_cache"].user_override


def keep_graphs_off_disk(off: bool) -> None:
    """Switch the disk cache of traced graphs off while this thread has a policy, and back.

    Its key leaves out the dtypes of autocast in torch 2.9 and before, and has too few of them to
    tell all policies apart in any: a graph of one policy could be taken for another's. What
    inductor makes of a graph is cached all the same.
    """
    config, setting = _graph_cache_setting()
    if isinstance(setting, ContextVar):
        # The thread's own. Past the module's __setattr__, which costs 10 us.
        if off:
            _found.setting = setting.get()
        setting.set(False if off else _found.setting)
        return
    with _off_lock:  # an older torch: one setting for the process
        if off:
            _off_before.append(config.enable_autograd_cache)
            config.enable_autograd_cache = False
        else:
            before = _off_before[0]
            _off_before.pop()
            if not _off_before:
                config.enable_autograd_cache = before


def when_trace_ends(callback: Callable[[], None]) -> None:
    """Call ``callback`` when Dynamo is done with the function that it traces now, if it does."""
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    if convert is None:
        return
    try:
        translator = convert.InstructionTranslator.current_tx()
    except AttributeError:  # it traces nothing
        return
    if translator is not None:  # nor here, in torch 2.9 and before
        translator.output.add_cleanup_hook(callback)


@constant_in_graphs
def other_region_in_graph(region: Any, begin: Any, end: Any) -> bool:
    """Whether the graph that Dynamo traces now has, inside ``region``, another region open.

    ``region`` is a mode that was entered by ``with`` in the traced code; ``begin`` and ``end`` are
    the calls in the graph between which other regions with a policy are open. True also where the
    order cannot be known, since Dynamo keeps the blocks of the compiled function alone, not those
    of functions that it calls. Private; checked on 2.13.
    """
    convert = sys.modules["torch._dynamo.symbolic_convert"]
    translator = convert.InstructionTranslator.current_tx()
    steps = {
        torch.amp.autocast_mode._enter_autocast: (1, 0),
        torch.amp.autocast_mode._exit_autocast: (-1, 0),
        begin: (0, 1),
        end: (0, -1),
    }
    found = [steps.get(node.target, (0, 0)) for node in translator.output.graph.nodes]
    regions, policies = sum(r for r, _ in found), sum(p for _, p in found)
    before = 0
    for block in translator.block_stack:
        context = block.with_context
        context = context.unwrap() if hasattr(context, "unwrap") else context
        if getattr(context, "value", None) is region:
            return policies > 0 or regions > before
        before += type(context).__name__ == "AutocastModeVariable"
    return policies > 0 or regions > 0


def forget_graphs() -> bool:
    """Make Dynamo forget all that it has compiled. False, and nothing is done, while it traces.

    ``torch.compiler.reset`` forgets settings of users too. Checked on 2.13.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return True
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    if convert is not None:
        try:
            if convert.InstructionTranslator.current_tx() is not None:
                return False
        except AttributeError:  # it traces nothing
            pass
    dynamo.reset_code_caches()
    return True


@constant_in_graphs
def under_vmap() -> bool:
    """Whether the thread is in a ``torch.func.vmap``, under which autocast casts for fewer ops."""
    functorch = _private("_functorch")
    stack = functorch.get_interpreter_stack() if functorch.peek_interpreter_stack() else None
    return any(i.key() == functorch.TransformType.Vmap for i in stack or ())


def under_transform() -> bool:
    """Whether the thread is in a ``torch.func`` transform: grad, jvp, vmap or what is made of them.

    There is no public query. Checked on torch 2.6 to 2.13.
    """
    return _private("_functorch").peek_interpreter_stack() is not None


def outside_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor made inside ``torch.func`` transforms wraps: it outlives them.

    ``torch.func.debug_unwrap`` does this one level at a time, and is not in torch 2.6. Checked on
    2.6 and 2.13.
    """
    functorch = _private("_functorch")
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def came_through_transform(error: BaseException) -> bool:
    """Whether ``error`` was raised inside a ``torch.func`` transform that was called below here."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").startswith("torch._functorch"):
            return True
        traceback = traceback.tb_next
    return under_transform()


NUMBER_WITHOUT_VALUE = "Cannot access data pointer of Tensor that doesn't have storage"
"""How torch's error begins where ``torch.func.grad`` has wrapped a Python number, as in ``x * 2``,
and a kernel in Python is to be called with it (torch 2.6 to 2.13)."""


def fused_paths_off() -> bool:
    """Whether ``torch.nn`` keeps its fused transformer kernels out of the region that is on now.

    It asks a question of its own, which names no device and means one of them.
    """
    return bool(getattr(torch, "is_autocast_enabled")())  # noqa: B009 - see above


def frames_compiled() -> int:
    """How many frames Dynamo has compiled; a step in which this grows says nothing of its speed.

    Private because torch has no public count. Read on 2.13; without it every step counts as one
    that compiled nothing.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    try:
        return int(utils.counters["frames"]["total"])  # type: ignore[union-attr]
    except (AttributeError, KeyError, TypeError):
        return 0


def current_autograd_node() -> Any:
    """The node of the backward pass that runs in this thread, or None outside of one.

    Private; there from torch 2.1 on, checked on 2.6 and 2.13.
    """
    return torch._C._current_autograd_node()


def sequence_of(node: Any) -> int:
    """The number of an autograd node: nodes are numbered in the order in which they were made."""
    return int(node._sequence_nr())


def next_sequence_number() -> int:
    """The number that the next autograd node of this thread gets (checked on torch 2.6, 2.13)."""
    return int(torch._C._autograd._get_sequence_nr())


def out_of_graphs(func: _F) -> _F:
    """Have Dynamo break its graph at calls of ``func``, as it does at torch's own scaler.

    ``torch.compiler.disable`` sets this same attribute, but imports Dynamo and wraps each call.
    Checked on 2.13.
    """
    func._torchdynamo_disable = True  # type: ignore[attr-defined]
    func._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "a gradient scaler keeps counts on the host, so its methods are not traced"
    )
    return func


def not_as_frames(module: str) -> None:
    """Keep Dynamo from compiling the functions of a module as frames of their own.

    In a frame that Dynamo cannot trace (a graph break in a loop, an exception in a region) it runs
    the code as ordinary Python and tries each function that is called from there anew, amphal's
    too: those change torch's autocast state, which is no matter for a graph. Frames that it can
    trace still inline these functions. The mark is on the code object and costs a call nothing;
    ``torch._dynamo.disable`` would import Dynamo and wrap each call. Private; checked on 2.6
    (``skip_code``) and 2.13 (``set_code_exec_strategy``).
    """
    skip = _skipper()
    if skip is None:  # a build without Dynamo, which compiles nothing
        return
    pending: list[Any] = []
    for value in list(vars(sys.modules[module]).values()):
        if getattr(value, "__module__", None) == module:
            pending += vars(value).values() if isinstance(value, type) else [value]
    while pending:
        value = pending.pop()
        value = getattr(value, "fget", getattr(value, "__func__", value))
        code = value if isinstance(value, CodeType) else getattr(value, "__code__", None)
        if isinstance(code, CodeType):
            skip(code)
            pending += [c for c in code.co_consts if isinstance(c, CodeType)]


@functools.cache
def _skipper() -> Callable[[CodeType], Any] | None:
    try:
        frames: Any = importlib.import_module("torch._C._dynamo.eval_frame")
    except ImportError:
        return None
    if hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        return lambda code: frames.set_code_exec_strategy(code, strategy)
    skip: Callable[[CodeType], Any] | None = getattr(frames, "skip_code", None)
    return skip


not_as_frames(__name__)
