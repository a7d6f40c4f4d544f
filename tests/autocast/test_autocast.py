"""autocast regions: what they enable, what they restore, what they refuse."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import pickle
import threading
import warnings
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any

import pytest
import torch

import amphal
from amphal.contract import Availability, get_backend
from amphal.contract import registry as _registry
from amphal.errors import (
    ArgumentTypeError,
    AutocastStateError,
    DeviceNotAvailableError,
    UnknownDeviceError,
    UnsupportedPrecisionError,
)
from amphal.testing import simulate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X = torch.ones(2, 2)


@pytest.fixture(autouse=True)
def _state_is_restored() -> Iterator[None]:
    """Whatever a test does, autocast must be off, clean and un-nested afterwards."""
    with warnings.catch_warnings():
        # This suite names bf16 and fp16 on whatever CPU it runs on.
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        yield
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is BF16
    assert torch.is_autocast_cache_enabled()
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


def state() -> tuple[bool, torch.dtype]:
    """Autocast on the CPU now: on or off, and its dtype."""
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def result() -> torch.dtype:
    """The dtype in which a matrix product runs now."""
    return (X @ X).dtype


def test_it_is_an_instance_of_torchs_class_with_its_attributes() -> None:
    """Other libraries look at the type and at these four attributes."""
    region = amphal.autocast("cpu", BF16)
    assert isinstance(region, torch.autocast)
    assert (region.device, region.fast_dtype, region._enabled) == ("cpu", BF16, True)
    assert hasattr(region, "_cache_enabled")


def test_torchs_order_of_arguments() -> None:
    """A drop-in: device_type, dtype, enabled, cache_enabled by position."""
    with amphal.autocast("cpu", torch.float16, True, False):
        assert state() == (True, FP16)
        assert not torch.is_autocast_cache_enabled()
    with amphal.autocast("cpu", torch.float16, False):
        assert not state()[0]


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
@pytest.mark.parametrize("dtype", [BF16, "bf16", "bfloat16", "BF16"])
def test_every_spelling_is_normalised_before_any_check(device: Any, dtype: Any) -> None:
    """An index, a torch.device, a name of a dtype: the same region, the same state."""
    with amphal.autocast(device, dtype):
        assert state() == (True, BF16)
        assert result() is BF16


def test_a_plan_is_a_region() -> None:
    """The plan's dtype on the plan's device; an explicit dtype wins over it."""
    plan = amphal.detect("cpu", precision="fp16")
    with amphal.autocast(plan):
        assert state() == (True, FP16)
    with plan.autocast():
        assert state() == (True, FP16)
    with plan.autocast(enabled=False):
        assert not state()[0]
    with amphal.autocast(plan, "bf16"):
        assert state() == (True, BF16)


def test_without_arguments_the_plan_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """autocast() follows detect(), environment included."""
    monkeypatch.setenv("AMPHAL_DEVICE", "cpu")
    for name, dtype in (("bf16", BF16), ("fp16", FP16), ("fp32", FP32), ("bf16", BF16)):
        monkeypatch.setenv("AMPHAL_PRECISION", name)
        amphal.detect.cache_clear()
        with amphal.autocast():
            assert result() is dtype
        with amphal.autocast("cpu"):
            assert result() is dtype


@pytest.mark.parametrize("dtype", [FP32, "fp32", "float32"])
def test_float32_means_full_precision_in_silence(dtype: Any) -> None:
    """On every device the same: no warning, no casting, also inside a low-precision region."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amphal.autocast("cpu", dtype):
            assert result() is FP32
    with amphal.autocast("cpu", BF16):
        with amphal.autocast("cpu", dtype):
            assert result() is FP32
        assert result() is BF16


def test_a_slow_dtype_warns_once() -> None:
    """bf16 on a CPU without bf16 instructions is many times slower than fp32: it is said, once."""
    slow = amphal.Hardware("cpu", "an old Xeon", architecture="x86_64", flags=frozenset({"avx2"}))
    with simulate(slow), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with amphal.autocast("cpu", BF16):
                pass
        amphal.autocast("cpu:0", "bf16")
    assert [w.category for w in caught] == [amphal.PrecisionWarning]
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (("cud",), UnknownDeviceError, "cuda"),
        (("npu", BF16), UnknownDeviceError, "no backend"),
        (("npu", BF16, False), UnknownDeviceError, "no backend"),
        (("meta", BF16), UnknownDeviceError, "no backend"),
        ((7,), ArgumentTypeError, "got int"),
        (("cpu", torch.float64), UnsupportedPrecisionError, "float64"),
        (("cpu", torch.int8), UnsupportedPrecisionError, "int8"),
        (("cpu", "half-ish"), UnsupportedPrecisionError, "half-ish"),
        (("cpu", 16), ArgumentTypeError, "got int"),
        (("cpu", BF16, 1), ArgumentTypeError, "enabled must be True or False"),
        (("cpu", BF16, None), ArgumentTypeError, "enabled must be True or False"),
        (("cpu", BF16, True, "no"), ArgumentTypeError, "cache_enabled must be"),
        ((torch.nn.Linear(1, 1),), ArgumentTypeError, "got Linear"),
        ((amphal.Hardware("cpu", "x"),), ArgumentTypeError, "description"),
        ((len, BF16), ArgumentTypeError, "decorates the function below"),
    ],
)
def test_bad_input_is_an_error_and_changes_nothing(
    args: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    """A wrong device, dtype or flag never leaves a region that runs in fp32 with a warning."""
    with pytest.raises(error, match=message):
        amphal.autocast(*args)
    assert not state()[0]


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_an_absent_device_is_the_same_error_on_every_device(device: str) -> None:
    """torch warns for cuda and stays silent for mps; here both refuse. Off asks for nothing."""
    backend = get_backend(device)
    absent = dataclasses.replace(backend, available=lambda: Availability(False, "not here"))
    with _registry.overridden(absent):
        for spelling in (device, f"{device}:0", torch.device(device)):
            with pytest.raises(DeviceNotAvailableError, match="not here"):
                amphal.autocast(spelling, FP16)
            assert not torch.is_autocast_enabled(device)
        with amphal.autocast(device, enabled=False):
            pass


def test_an_impossible_dtype_is_an_error() -> None:
    """What the hardware cannot do at all never becomes fp32 in silence."""
    old = amphal.Hardware("mps", "Apple M2", architecture="M2", os="darwin", os_version=(13, 6))
    with simulate(old), pytest.raises(UnsupportedPrecisionError, match="cannot do"):
        amphal.autocast("mps", BF16)


def test_reentry_and_recursion_restore_what_was_found() -> None:
    """One object entered twice: torch's stays on for good, this one does not."""
    region = amphal.autocast("cpu", BF16)
    with region:
        with region:
            with region:
                pass
            assert state() == (True, BF16)
        assert state() == (True, BF16)
    assert not state()[0]

    @amphal.autocast("cpu", BF16)
    def recursive(n: int) -> torch.dtype:
        return result() if n == 0 else recursive(n - 1)

    assert recursive(5) is BF16


def test_one_region_shared_by_threads() -> None:
    """State is per thread: a thread that had autocast on keeps it, one that had not does not."""
    region = amphal.autocast("cpu", BF16)
    wrong: list[str] = []
    start = threading.Barrier(4)

    def work(ambient: bool) -> None:
        start.wait()
        with torch.autocast("cpu", dtype=BF16, enabled=ambient):
            for _ in range(300):
                with region:
                    if not torch.is_autocast_enabled("cpu"):
                        wrong.append("off inside")
                if torch.is_autocast_enabled("cpu") is not ambient:
                    wrong.append("not restored")

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_exception_in_the_body_restores_and_propagates() -> None:
    """Nothing stays enabled after an exception."""
    with pytest.raises(ZeroDivisionError):
        with amphal.autocast("cpu", FP16, cache_enabled=False):
            with amphal.autocast("cpu", BF16):
                raise ZeroDivisionError
    assert not state()[0]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("on_exit", [False, True])
@pytest.mark.parametrize(
    "step", ["_set_enabled", "_set_dtype", "_set_cache_enabled", "_clear_cache", "_exit_nesting"]
)
def test_an_interrupt_at_any_step_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, step: str, on_exit: bool, after: bool
) -> None:
    """Ctrl-C before or after a step of entering or leaving: what was changed is put back."""
    from amphal._autocast import region as _autocast

    region = amphal.autocast("cpu", FP16, cache_enabled=False)
    real, left = getattr(_autocast, step), [1]

    def interrupted(*args: Any) -> Any:
        if left and not after:
            left.clear()
            raise KeyboardInterrupt
        result = real(*args)
        if left:
            left.clear()
            raise KeyboardInterrupt
        return result

    if on_exit:
        region.__enter__()
        monkeypatch.setattr(_autocast, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            region.__exit__(None, None, None)
    else:
        monkeypatch.setattr(_autocast, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            with region:
                pass
    monkeypatch.undo()
    assert not left
    assert not _autocast._thread.stack
    assert state() == (False, BF16)


def test_leaving_what_was_not_entered_is_an_error() -> None:
    """Exit without enter, or in another thread, is named instead of corrupting state."""
    region = amphal.autocast("cpu", BF16)
    with pytest.raises(AutocastStateError, match="not entered"):
        region.__exit__(None, None, None)
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            region.__exit__(None, None, None)
        except AutocastStateError as exc:
            errors.append(exc)

    with region:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert len(errors) == 1


@pytest.mark.parametrize("inner", [BF16, FP16, FP32])
@pytest.mark.parametrize("cache", [None, False])
def test_exits_out_of_order_end_with_everything_off(inner: torch.dtype, cache: Any) -> None:
    """A suspended generator ends its region late: the last one to leave restores the first."""
    outer, other = amphal.autocast("cpu", FP16, True, cache), amphal.autocast("cpu", inner)
    outer.__enter__()
    other.__enter__()
    during = state()
    outer.__exit__(None, None, None)
    assert state() == during
    other.__exit__(None, None, None)
    assert state() == (False, BF16)


def test_a_suspended_generator_leaks_into_nobody_for_good() -> None:
    """A with-block in a generator that is dropped half-way is undone when it is closed."""

    def generate() -> Generator[int, None, None]:
        with amphal.autocast("cpu", BF16):
            yield 1
            yield 2

    generator = generate()
    next(generator)
    with amphal.autocast("cpu", FP16):
        generator.close()
        assert state() == (True, FP16)
    assert not state()[0]
    del generator
    gc.collect()


def test_a_decorated_generator_has_the_region_only_while_it_runs() -> None:
    """Between its yields the caller's state holds; values, sends, throws and returns go through."""

    @amphal.autocast("cpu", BF16)
    def generate() -> Generator[Any, Any, str]:
        got = yield state()
        try:
            yield got, state()
        except KeyError:
            yield "caught", state()
        return "done"

    def outer() -> Generator[Any, Any, None]:
        assert (yield from generate()) == "done"

    generator = outer()
    assert next(generator) == (True, BF16)
    assert not state()[0]
    assert generator.send("x") == ("x", (True, BF16))
    assert not state()[0]
    assert generator.throw(KeyError()) == ("caught", (True, BF16))
    assert not state()[0]
    assert list(generator) == []
    closed = generate()
    next(closed)
    closed.close()


def test_a_decorated_coroutine_does_not_leak_into_other_tasks() -> None:
    """While it awaits, other tasks of the thread run in their own state."""

    @amphal.autocast("cpu", BF16)
    async def work() -> list[bool]:
        seen = [state()[0]]
        for _ in range(3):
            await asyncio.sleep(0)
            seen.append(state()[0])
        return seen

    async def other() -> list[bool]:
        seen = []
        for _ in range(6):
            seen.append(state()[0])
            await asyncio.sleep(0)
        return seen

    @amphal.autocast("cpu", BF16)
    async def stream() -> AsyncGenerator[bool, None]:
        for _ in range(2):
            await asyncio.sleep(0)
            yield state()[0]

    async def main() -> tuple[list[bool], list[bool], list[tuple[bool, bool]]]:
        first, second = await asyncio.gather(work(), other())
        return first, second, [(on, state()[0]) async for on in stream()]

    inside, outside, streamed = asyncio.run(main())
    assert all(inside)
    assert not any(outside)
    assert streamed == [(True, False), (True, False)]


def test_decorators_bare_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """@autocast chooses at each call, @autocast(...) once; names and docstrings survive."""

    @amphal.autocast
    def bare(x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return x @ x

    @amphal.autocast("cpu", dtype="bf16")
    def called(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    assert (bare.__name__, bare.__doc__) == ("bare", "Multiply.")
    monkeypatch.setenv("AMPHAL_DEVICE", "cpu")
    monkeypatch.setenv("AMPHAL_PRECISION", "fp16")
    amphal.detect.cache_clear()
    assert bare(X).dtype is FP16
    monkeypatch.setenv("AMPHAL_PRECISION", "fp32")
    amphal.detect.cache_clear()
    assert bare(X).dtype is FP32
    assert called(X).dtype is BF16
    with pytest.raises(ArgumentTypeError, match="decorates a callable, got int"):
        amphal.autocast("cpu", BF16)(3)  # type: ignore[type-var]


def test_a_method_can_be_decorated() -> None:
    """forward of a module, as users write it; pickling and copying the module is unaffected."""

    class Model(torch.nn.Module):
        @amphal.autocast("cpu", dtype=BF16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    assert Model()(X).dtype is BF16


def test_a_region_travels() -> None:
    """A region can be pickled with the object that holds it."""
    region = pickle.loads(pickle.dumps(amphal.autocast("cpu", FP16)))
    with region:
        assert state() == (True, FP16)
    assert repr(region) == "<amphal.autocast cpu float16>"


def test_mixed_with_torchs_own_regions() -> None:
    """Inside or around torch.autocast, in any order, each restores the other's state."""
    with torch.autocast("cpu", dtype=BF16):
        with amphal.autocast("cpu", FP16):
            with torch.autocast("cpu", dtype=BF16):
                assert result() is BF16
            assert result() is FP16
        assert result() is BF16
        with amphal.autocast("cpu", enabled=False):
            assert result() is FP32


def test_under_a_default_device_mode() -> None:
    """torch.device as a context is a function mode: regions restore under it as well."""
    region = amphal.autocast("cpu", FP16)
    with torch.device("cpu"):
        with region:
            with region:
                assert result() is FP16
            assert result() is FP16
        assert result() is FP32
    with region:
        with torch.device("cpu"):
            assert result() is FP16


def test_new_threads_start_with_autocast_off() -> None:
    """torch's rule, kept: a region covers the thread that entered it."""
    seen: list[torch.dtype] = []
    with amphal.autocast("cpu", BF16):
        thread = threading.Thread(target=lambda: seen.append(result()))
        thread.start()
        thread.join()
    assert seen == [FP32]


def test_a_plan_for_a_device_that_is_not_here_is_refused() -> None:
    """A described or unpickled plan must not enter a region that changes nothing."""
    backend = dataclasses.replace(
        get_backend("cuda"),
        available=lambda: Availability(False, "not here"),
    )
    plan = amphal.detect(amphal.Hardware("cuda", "Tesla T4", vendor="nvidia", capability=(7, 5)))
    with _registry.overridden(backend):
        for use in (plan.autocast, lambda: amphal.autocast(plan, "bf16")):
            with pytest.raises(DeviceNotAvailableError, match="not here"):
                use()
        with plan.autocast(enabled=False):
            pass


def test_off_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """enabled=False without a device: no warning about a dtype, no absent device."""
    monkeypatch.setenv("AMPHAL_PRECISION", "fp16")
    amphal.detect.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amphal.autocast(enabled=False):
            assert result() is FP32
        with amphal.autocast(dtype="bf16", enabled=False):
            assert result() is FP32
        monkeypatch.setenv("AMPHAL_DEVICE", "mps")
        amphal.detect.cache_clear()
        with amphal.autocast(enabled=False):
            assert result() is FP32


def test_flags_are_told_by_identity() -> None:
    """1 is no flag, also after True has been cached."""
    amphal.autocast("cpu", BF16, True, True)
    for enabled, cache in ((1, True), (True, 1), (True, 1.0)):
        with pytest.raises(ArgumentTypeError):
            amphal.autocast("cpu", BF16, enabled, cache)  # type: ignore[call-overload]


def test_a_refused_warning_is_refused_again() -> None:
    """Where warnings are errors, a call that was refused does not succeed the second time."""
    slow = amphal.Hardware("cpu", "an old Xeon", architecture="x86_64", flags=frozenset({"avx2"}))
    with simulate(slow), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(amphal.PrecisionWarning):
                amphal.autocast("cpu", BF16)


def test_exits_out_of_order_under_a_default_device() -> None:
    """torch.set_default_device is a function mode, and changes nothing about restoring."""
    first, second = amphal.autocast("cpu", BF16), amphal.autocast("cpu", FP16)
    with torch.device("cpu"):
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
    assert state() == (False, BF16)


def test_static_methods_callable_objects_and_classes() -> None:
    """A staticmethod below, an object with an async __call__: driven; a class: refused."""

    class Holder:
        @amphal.autocast("cpu", BF16)
        @staticmethod
        def generate() -> Generator[torch.dtype, None, None]:
            yield result()

        @amphal.autocast("cpu", BF16)
        @classmethod
        def plain(cls) -> torch.dtype:
            return result()

        async def __call__(self) -> torch.dtype:
            await asyncio.sleep(0)
            return result()

    assert next(Holder.generate()) is BF16
    assert Holder.plain() is BF16
    assert asyncio.run(amphal.autocast("cpu", BF16)(Holder())()) is BF16
    with pytest.raises(ArgumentTypeError, match="class Holder"):
        amphal.autocast("cpu", BF16)(Holder)


def test_torchscript_refuses_a_decorated_function() -> None:
    """It would follow the function past its region in silence; torch's decorator refuses too."""

    @amphal.autocast("cpu", BF16)
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(RuntimeError, match="script mode"):
            torch.jit.script(decorated)


def test_an_exception_sent_into_a_generator_is_not_kept() -> None:
    """Its frames, and the tensors in them, are freed at once and not by the garbage collector."""
    import weakref

    @amphal.autocast("cpu", BF16)
    def generate() -> Generator[int, None, None]:
        while True:
            try:
                yield 1
            except KeyError:
                pass

    class Held:
        pass

    def throw(generator: Any) -> weakref.ref[Held]:
        held = Held()
        error = KeyError(held)
        generator.throw(error)
        return weakref.ref(held)

    gc.disable()
    try:
        generator = generate()
        next(generator)
        assert throw(generator)() is None
    finally:
        gc.enable()
    generator.close()


def test_regions_are_forgotten_with_the_registry_and_bounded() -> None:
    """The cache of regions follows the registry, and hostile keys cannot make it grow for good."""
    from amphal._autocast.autocast import _regions
    from amphal._choice import choose as _detect

    region = amphal.autocast("cpu", BF16)
    assert amphal.autocast("cpu", BF16) is region
    amphal.detect.cache_clear()
    assert amphal.autocast("cpu", BF16) is not region
    plan = amphal.detect("cpu")
    for i in range(1200):
        amphal.autocast(dataclasses.replace(plan, reasons=(str(i),)))
        amphal.detect(amphal.Hardware("cpu", str(i)))
    assert len(_regions) <= 512
    assert len(_detect._cache) <= 256
