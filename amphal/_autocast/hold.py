"""``amphal.hold_casts``: casts of weights that outlive regions while the weights stand still."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .. import _warnings
from .._torch import drop_casts_after_each_step, private
from ..errors import ArgumentError, ArgumentTypeError, AutocastStateError, PrecisionWarning
from . import region

__all__ = ["hold_casts"]

_Parameters = dict[str, Any]
_Signature = list[tuple[int, int]]


def hold_casts(*modules: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Keep the casts of weights from region to region, until a weight changes or the block ends.

    torch keeps a cast until the outermost region ends, so each forward casts all weights again.
    In this block a weight that trains is cast once, then after each change: in the regions of
    this thread, of amphal and of other libraries. Outputs and gradients are the same bit for bit.

    All casts are dropped when any ``torch.optim`` optimizer has stepped; when a module is called
    and a parameter of it has another version or address than at the last call (``copy_``,
    ``load_state_dict``, ``swap``); when the dtype changes; when a module gets a leaf that requires
    gradients as its input; in regions with ``ops=``; and when the block ends.

    A write through ``.data`` is not seen: call ``torch.clear_autocast_cache()`` after it.

    Args:
        modules: the modules to watch as a whole when they are called. Every other module that is
            called in the block is watched for its own parameters and those of its children.

    Raises:
        ArgumentTypeError: something else than modules, or nothing.
        ArgumentError: a module of FSDP, whose gathered weights must not be kept.
        AutocastStateError: on exit, the block was entered in another thread.

    Warns:
        PrecisionWarning: no weight requires gradients. torch keeps no casts of those;
            :func:`precast_` stores them in the low precision.
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()  # a graph has its own casts
    _check(modules)
    return _holding(modules)


def _check(modules: tuple[Any, ...]) -> None:
    wrong = [type(m).__name__ for m in modules if not isinstance(m, nn.Module)]
    if wrong or not modules:
        got = wrong[0] if wrong else "nothing"
        raise ArgumentTypeError(
            f"hold_casts() takes modules, got {got}; write: with amphal.hold_casts(model):"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(
        kind
        for name in ("FullyShardedDataParallel", "FSDPModule")
        if (kind := getattr(fsdp, name, None)) is not None
    )
    if kinds and any(isinstance(m, kinds) for module in modules for m in module.modules()):
        raise ArgumentError(
            "hold_casts() got a module of FSDP: casts of its gathered weights would stay in memory "
            "after FSDP has freed the weights. Run it without hold_casts"
        )
    if not any(p.requires_grad for module in modules for p in module.parameters()):
        _warnings.warn(
            "hold_casts() has nothing to hold: torch keeps casts of weights that require gradients "
            "alone, and none of these modules' do; amphal.precast_(model) stores frozen weights in "
            "the low precision",
            PrecisionWarning,
        )


@contextlib.contextmanager
def _holding(modules: tuple[nn.Module, ...]) -> Iterator[None]:
    drop_casts_after_each_step()
    thread = threading.get_ident()
    torch.clear_autocast_cache()  # what a surrounding region has cast was not watched
    _watch.begin(modules)
    try:
        region.hold(True)
        try:
            yield
        finally:
            if threading.get_ident() != thread:
                raise AutocastStateError(
                    "a block of hold_casts() was left in another thread than it was entered in; "
                    "the casts of that thread stay held. Enter and leave it in the same thread"
                )
            region.hold(False)
    finally:
        _watch.end()
        torch.clear_autocast_cache()


class _Watch:
    """What the called modules' parameters were when their casts were made, for all threads.

    One global hook and not one a module: it sees modules that were not named, nothing is left on a
    model, and torch's fused encoder layer, which looks for hooks of modules, stays in use.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.blocks = 0
        self.hook: Any = None
        self.seen: weakref.WeakKeyDictionary[
            nn.Module, tuple[list[_Parameters], _Signature | None]
        ] = weakref.WeakKeyDictionary()
        self.mode: tuple[bool, bool] | None = None
        self.dtypes: dict[str, torch.dtype] = {}
        self.devices: set[str] = set()

    def begin(self, modules: tuple[nn.Module, ...]) -> None:
        with self.lock:
            for module in modules:
                self.take(module, list(module.modules()))
            if not self.blocks:
                self.hook = register_module_forward_pre_hook(_before_forward)
            self.blocks += 1

    def end(self) -> None:
        with self.lock:
            self.blocks -= 1
            if not self.blocks:
                self.hook.remove()
                self.seen.clear()
                self.mode = None
                self.dtypes.clear()
                self.devices.clear()

    def take(self, module: nn.Module, parts: list[nn.Module]) -> None:
        """Note the parameters of ``parts`` as what a call of ``module`` uses."""
        dicts: list[_Parameters] = [part._parameters for part in parts]
        self.note(module, dicts)

    def note(self, module: nn.Module, dicts: list[_Parameters]) -> None:
        self.seen[module] = dicts, _signature(dicts)
        self.devices.update(p.device.type for d in dicts for p in d.values() if p is not None)

    def before(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Drop the casts if a module that is about to run would find wrong ones."""
        changed = self.mode_changed() or any(
            isinstance(x, Tensor) and x.requires_grad and x.is_leaf for x in inputs
        )
        known = self.seen.get(module)
        if known is None:
            with self.lock:
                self.take(module, [module, *module.children()])
        else:
            dicts, signature = known
            if signature is None or _signature(dicts) != signature:
                changed = True
                self.note_all()
        if changed:
            torch.clear_autocast_cache()

    def mode_changed(self) -> bool:
        mode = torch.is_inference_mode_enabled(), _CASTS_LACK_GRAD and torch.is_grad_enabled()
        changed = self.mode is not None and self.mode != mode
        self.mode = mode
        for device in tuple(self.devices):
            if torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
                changed |= self.dtypes.get(device, dtype) is not dtype
                self.dtypes[device] = dtype
        return changed

    def note_all(self) -> None:
        """Of all modules, so that one step of an optimizer does not drop the casts at each."""
        with self.lock:
            for module, (dicts, _) in list(self.seen.items()):
                self.note(module, dicts)


def _signature(dicts: list[_Parameters]) -> _Signature | None:
    """Version and address of each parameter; None where one has no memory of its own.

    The address tells ``p.data = other``, which leaves the version as it was. A parameter that was
    replaced needs no sign: torch finds casts by the tensor object.
    """
    try:
        return [(p._version, p.data_ptr()) for d in dicts for p in d.values() if p is not None]
    except RuntimeError:  # fake, batched or uninitialized; inference tensors have no version
        return None


_watch = _Watch()
_CASTS_LACK_GRAD = private.torch_version() < (2, 13)


def _before_forward(module: nn.Module, inputs: Any) -> None:
    if not torch.compiler.is_compiling():
        _watch.before(module, inputs)


private.not_as_frames(__name__)
