"""Backends with one fault each, under the conformance suite; run by test_conformance_faults.py.

Each class is one fault of the CPU's backend, a sound one otherwise, and is named after it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import platform
import sys
from typing import Any

import torch

import amphal
from amphal import OpLists
from amphal.contract import Availability, Backend, DtypeSupport, get_backend
from amphal.testing import BackendConformance

CPU = get_backend("cpu")
_count = itertools.count()
FINE = DtypeSupport("emulated", False, "a test says so")
BOTH = {torch.bfloat16: FINE, torch.float16: FINE}


def faulty(**changes: Any) -> Backend:
    return dataclasses.replace(CPU, **changes)


def lists(change: Any) -> Any:
    return lambda dtype: change(CPU.op_lists(dtype))


def moved(declared: OpLists, op: str, policy: str) -> OpLists:
    """The lists with one op on another list; on none for an empty policy."""
    fields = {f.name: getattr(declared, f.name) - {op} for f in dataclasses.fields(declared)}
    if policy:
        fields[policy] |= {op}
    return OpLists(**fields)


def raising() -> Availability:
    raise RuntimeError("driver mismatch")


def importing() -> Availability:
    import no_such_vendor_module  # type: ignore[import-not-found]  # noqa: F401

    return Availability(True)


def probe_counting(index: int | None) -> amphal.Hardware:
    return dataclasses.replace(CPU.probe(index), memory=next(_count))


def dtypes_by_environment(hw: amphal.Hardware) -> Any:
    why = f"a machine with {len(os.environ)} variables"
    return {**BOTH, torch.float16: DtypeSupport("emulated", False, why)}


def dtypes_counting(hw: amphal.Hardware) -> Any:
    return {**BOTH, torch.float16: DtypeSupport("emulated", False, f"asked {next(_count)} times")}


def scaler_by_platform(hw: amphal.Hardware) -> Any:
    return dataclasses.replace(CPU.scaler(hw), fp64=platform.machine() != "other")


def lists_counting(dtype: torch.dtype) -> OpLists:
    return CPU.op_lists(dtype) if next(_count) % 2 else OpLists()


def lists_changing_torch(dtype: torch.dtype) -> OpLists:
    torch.rand(1)
    return CPU.op_lists(dtype)


def lists_overlapping(dtype: torch.dtype) -> OpLists:
    return OpLists(lower_precision=frozenset({"mm"}), fp32=frozenset({"mm"}))


class TestAvailableRaises(BackendConformance):
    backend = faulty(available=raising)


class TestAvailableIsTrue(BackendConformance):
    backend = faulty(available=lambda: True)


class TestAvailableImportsUnguarded(BackendConformance):
    backend = faulty(available=importing)


class TestProbeCounts(BackendConformance):
    backend = faulty(probe=probe_counting)


class TestProbeOfAnotherType(BackendConformance):
    backend = faulty(probe=lambda index: amphal.Hardware("cuda", "a GPU"))


class TestIndexIsText(BackendConformance):
    backend = faulty(current_index=lambda: "0")


class TestIndexIsForgotten(BackendConformance):
    backend = faulty(probe=lambda index: CPU.probe(None))


class TestDtypesReadTheEnvironment(BackendConformance):
    backend = faulty(dtypes=dtypes_by_environment)


class TestDtypesCount(BackendConformance):
    backend = faulty(dtypes=dtypes_counting)


class TestScalerReadsThePlatform(BackendConformance):
    backend = faulty(scaler=scaler_by_platform)


class TestOpListsCount(BackendConformance):
    backend = faulty(op_lists=lists_counting)


class TestOpListsChangeTorch(BackendConformance):
    backend = faulty(op_lists=lists_changing_torch)


class TestOpListsOverlap(BackendConformance):
    backend = faulty(op_lists=lists_overlapping)


class TestOneDtypeIsMissing(BackendConformance):
    backend = faulty(dtypes=lambda hw: {torch.bfloat16: FINE})


class TestAReasonIsNoPhrase(BackendConformance):
    backend = faulty(
        dtypes=lambda hw: {**BOTH, torch.float16: DtypeSupport("emulated", False, "x")}
    )


class TestScalerIsATuple(BackendConformance):
    backend = faulty(scaler=lambda hw: (True, True, True, True))


class TestAnOpDoesNotExist(BackendConformance):
    backend = faulty(op_lists=lists(lambda old: moved(old, "mmm", "fp32")))


class TestAnOpIsUnclassified(BackendConformance):
    backend = faulty(op_lists=lists(lambda old: moved(old, "mm", "unclassified")))


class TestAnOpIsForgotten(BackendConformance):
    backend = faulty(op_lists=lists(lambda old: moved(old, "bmm", "")))


class TestAPolicyIsWrong(BackendConformance):
    backend = faulty(op_lists=lists(lambda old: moved(old, "fft_rfft", "lower_precision")))


class TestACommonPolicyIsWrong(BackendConformance):
    backend = faulty(op_lists=lists(lambda old: moved(old, "linear", "fp32")))


class TestABanIsInvented(BackendConformance):
    backend = faulty(op_lists=lists(lambda old: moved(old, "binary_cross_entropy", "banned")))


class TestOverflowIsDenied(BackendConformance):
    backend = faulty(scaler=lambda hw: dataclasses.replace(CPU.scaler(hw), detects_overflow=False))


class TestVendorScalerIsNoClass(BackendConformance):
    backend = faulty(vendor_scaler=lambda: torch.amp.GradScaler("cpu"))


def no_wait() -> None:
    raise RuntimeError("no stream")


class TestSynchronizeRaises(BackendConformance):
    backend = faulty(synchronize=no_wait)


class NeverSkips(torch.amp.GradScaler):
    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """As if no gradient had overflowed."""


class TellsNobody(torch.amp.GradScaler):
    def _found_inf_per_device(self, optimizer: Any) -> Any:
        return {}


class Forgets(torch.amp.GradScaler):
    def load_state_dict(self, state_dict: Any) -> None:
        """Takes nothing up."""


def saturating(kind: type[torch.amp.GradScaler]) -> Backend:
    blind = lambda hw: dataclasses.replace(CPU.scaler(hw), detects_overflow=False)  # noqa: E731
    return faulty(scaler=blind, vendor_scaler=lambda: kind)


class TestTheScalerNeverSkips(BackendConformance):
    backend = saturating(NeverSkips)


class TestTheScalerTellsNobody(BackendConformance):
    backend = saturating(TellsNobody)


class TestTheScalerForgets(BackendConformance):
    backend = saturating(Forgets)


def dtypes_saying(why: Any) -> Any:
    def dtypes(hw: amphal.Hardware) -> Any:
        return {**BOTH, torch.float16: DtypeSupport("emulated", False, f"it says {why()}")}

    return dtypes


def read_a_file() -> int:
    with open(__file__, encoding="utf-8") as file:
        return len(file.read())


def set_a_variable() -> str:
    os.environ["TOY_DEBUG"] = "1"
    return "nothing"


def set_the_precision() -> str:
    torch.set_float32_matmul_precision("highest")
    return "nothing"


class TestDtypesReadAFile(BackendConformance):
    backend = faulty(dtypes=dtypes_saying(read_a_file))


class TestDtypesAskTorch(BackendConformance):
    backend = faulty(dtypes=dtypes_saying(lambda: torch.backends.cpu.get_cpu_capability()))


class TestDtypesAskCuda(BackendConformance):
    backend = faulty(dtypes=dtypes_saying(lambda: torch.cuda.is_available()))


class TestDtypesReadTorchsVersion(BackendConformance):
    backend = faulty(dtypes=dtypes_saying(lambda: torch.__version__))


class TestDtypesReadThePlatform(BackendConformance):
    backend = faulty(dtypes=dtypes_saying(lambda: sys.platform))


class TestDtypesCountCores(BackendConformance):
    backend = faulty(dtypes=dtypes_saying(lambda: os.cpu_count()))


class TestDtypesSetAVariable(BackendConformance):
    backend = faulty(dtypes=dtypes_saying(set_a_variable))


class TestDtypesSetThePrecision(BackendConformance):
    backend = faulty(dtypes=dtypes_saying(set_the_precision))


class TestAReasonIsNoWord(BackendConformance):
    backend = faulty(
        dtypes=lambda hw: {**BOTH, torch.float16: DtypeSupport("emulated", False, ". .")}
    )


def available_seeding() -> Availability:
    torch.manual_seed(0)
    return Availability(True)


def probe_setting(index: int | None) -> amphal.Hardware:
    torch.set_default_dtype(torch.float32)
    return CPU.probe(index)


class TestAvailableSeeds(BackendConformance):
    backend = faulty(available=available_seeding)


class TestProbeSetsTheDefaultDtype(BackendConformance):
    backend = faulty(probe=probe_setting)


def probe_by_index(index: int | None) -> amphal.Hardware:
    return dataclasses.replace(CPU.probe(index), memory=None if index is None else 1)


class TestProbeOfTheCurrentIsAnother(BackendConformance):
    backend = faulty(probe=probe_by_index)


class TestIndexIsNegative(BackendConformance):
    backend = faulty(current_index=lambda: -1)


class TestAnOverloadIsLeftOut(BackendConformance):
    backend = faulty(op_lists=lists(lambda old: moved(old, "softmax", "fp32")))


class TestAPolicyMakesNoSense(BackendConformance):
    backend = faulty(op_lists=lists(lambda old: moved(old, "relu", "fp32_set_opt_dtype")))
