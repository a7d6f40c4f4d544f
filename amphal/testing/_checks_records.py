"""The part of the conformance suite that asks a backend and computes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib import metadata

import pytest
import torch

from .. import _front
from .._torch import all_op_names
from ..contract import (
    LOW_PRECISION,
    Availability,
    DtypeSupport,
    Hardware,
    OpLists,
    ScalerSupport,
    answering,
    base_name,
    is_defined,
    overloads,
    refusal,
    registry,
)
from ..errors import DeviceNotAvailableError, UnknownDeviceError, UnsupportedPrecisionError
from ._subject import (
    Subject,
    another_machine,
    broken_vendor_imports,
    needs_device,
    torch_state,
    unusual_state,
)

__all__ = ["RecordChecks"]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

# Prints the modules that loading an entry point brings, beyond torch and amphal.
_IMPORTS = """
import sys, amphal, amphal.errors
from importlib import metadata
before = set(sys.modules)
(entry,) = (e for e in metadata.entry_points(group={group!r}) if e.name == {name!r}
            and e.value == {value!r})
entry.load()
own = entry.value.partition(":")[0].partition(".")[0]
new = {{m.partition(".")[0] for m in set(sys.modules) - before}} - {{own, "torch", "amphal"}}
print(sorted(new - set(sys.stdlib_module_names)))
"""


def _instead_of(op: str, subject: Subject) -> tuple[str, ...]:
    """The overloads that torch has where it lacks this one; empty if another torch has it."""
    if is_defined(op) or "imname" in op:  # overloads with dimension names went with torch 2.13
        return ()
    others = {"cpu", "cuda", "mps", "xpu"} - {subject.device_type}
    if any(op in registry.get_backend(name).op_lists(torch.bfloat16) for name in others):
        return ()
    return overloads(base_name(op))


class RecordChecks:
    """``available``, ``probe`` and the pure functions."""

    def test_available_never_raises(self, subject: Subject) -> None:
        """``available()`` answers with an Availability, also when vendor imports fail."""
        with answering(subject.backend, "available"):
            answer = subject.backend.available()
        assert isinstance(answer, Availability), (
            f"available() returned {answer!r}; it must return an amphal.contract.Availability"
        )
        with broken_vendor_imports():
            broken = subject.backend.available()
        assert isinstance(broken, Availability), (
            f"available() returned {broken!r} where no vendor module can be imported"
        )
        assert answer or answer.reason.strip(), "a 'no' must carry its reason"
        with unusual_state(subject.device_type) as changed:
            again = subject.backend.available()
        assert again == answer, f"available() gave two answers: {answer} and {again}"
        assert not changed, f"available(), asked again, changed {', '.join(changed)}"

    def test_importing_it_imports_no_vendor_module(self, subject: Subject) -> None:
        """Loading the entry point in a fresh process imports only the plug-in's own package."""
        entries = metadata.entry_points(group=registry.ENTRY_POINT_GROUP, name=subject.device_type)
        if not entries or subject.source in ("", "register_backend()"):
            pytest.skip("it was registered in this process, not by an entry point")
        (entry,) = list(entries)[:1]
        code = _IMPORTS.format(group=entry.group, name=entry.name, value=entry.value)
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            # This process's path, and not the folder it was started in: there may be a checkout.
            cwd=tempfile.gettempdir(),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert done.returncode == 0, f"{entry.value} cannot be loaded:\n{done.stderr[-2000:]}"
        assert done.stdout.strip() == "[]", (
            f"loading {entry.value} imports {done.stdout.strip()}; "
            "import vendor modules inside the functions that need them"
        )

    @needs_device
    def test_probe_reads_facts(self, subject: Subject) -> None:
        """``probe()`` gives the same JSON-able record of the device twice, with a name."""
        first = subject.backend.probe(None)
        with unusual_state(subject.device_type) as changed:
            second = subject.backend.probe(None)
        assert not changed, f"probe(), asked again, changed {', '.join(changed)}"
        assert isinstance(first, Hardware), f"probe() returned {first!r}, not an amphal.Hardware"
        assert first == second, f"probe() gave two answers: {first} and {second}"
        assert first.device_type == subject.device_type, (
            f"probe() of {subject.device_type!r} says device type {first.device_type!r}"
        )
        assert first.name.strip(), "the record has no name: what does the driver call the device?"
        json.dumps(first.to_dict())

    @needs_device
    def test_current_index_is_one_that_probe_knows(self, subject: Subject) -> None:
        """``current_index()`` is None or an index, and ``probe`` of an index says that index."""
        index = subject.backend.current_index()
        right = index is None or (type(index) is int and index >= 0)
        assert right, f"current_index() returned {index!r}, and not None or an index"
        at = index or 0
        found = subject.backend.probe(at)
        assert found.index == at, f"probe({at}) must say index={at}, it says {found.index}"
        current = subject.backend.probe(None)
        assert replace(found, index=None) == replace(current, index=None), (
            f"probe(None) is about the current device, {at}, and says {current}; "
            f"probe({at}) says {found}"
        )
        if index is not None:
            lies = subject.tensor(1).device.index
            assert lies == index, f"current_index() says {index}; a tensor made now lies on {lies}"

    @pytest.mark.parametrize("dtype", LOW_PRECISION, ids=_NAMES.get)
    def test_op_lists_are_pure(self, subject: Subject, dtype: torch.dtype) -> None:
        """``op_lists(dtype)`` gives the same lists twice, on another machine too."""
        before = torch_state(subject.device_type)
        first = subject.backend.op_lists(dtype)
        assert isinstance(first, OpLists), f"op_lists() returned {first!r}, not an amphal.OpLists"
        again = subject.backend.op_lists(dtype)  # what it imports at first use is imported now
        with another_machine(subject.device_type) as asked:
            second = subject.backend.op_lists(dtype)
        assert first == again == second, "op_lists() gave two answers; it must be pure"
        assert not asked, f"op_lists() must be pure; it reached for {', '.join(asked)}"
        assert torch_state(subject.device_type) == before, "op_lists() changed torch's state"

    @pytest.mark.parametrize("function", ["dtypes", "scaler", "float32_matmul"])
    def test_answers_about_hardware_are_pure(self, subject: Subject, function: str) -> None:
        """Each record gives the same answer twice, on another machine too, and changes nothing."""
        before = torch_state(subject.device_type)
        ask = getattr(subject.backend, function)
        for hardware in subject.records:
            first = ask(hardware)
            again = ask(hardware)  # what it imports at first use is imported now
            with another_machine(subject.device_type, another_torch=True) as asked:
                second = ask(hardware)
            other = second if first == again else again
            assert first == other, (
                f"{function}() gave two answers about {hardware.name!r}: {first} and {other}; "
                "it must depend on the record alone"
            )
            assert not asked, (
                f"{function}() must depend on the record alone; about {hardware.name!r} it "
                f"reached for {', '.join(asked)}: let probe() ask, and the record keep the answer"
            )
        assert torch_state(subject.device_type) == before, f"{function}() changed torch's state"

    def test_float32_matmul_names_what_torch_takes(self, subject: Subject) -> None:
        """Precisions below "highest" that change something, each with how."""
        for hardware in subject.records:
            declared = dict(subject.backend.float32_matmul(hardware))
            assert declared.keys() <= {"high", "medium"}, (
                f"float32_matmul() names {sorted(declared)} for {hardware.name!r}; "
                "it may name 'high' and 'medium'"
            )
            assert all(isinstance(how, str) and how.strip() for how in declared.values()), (
                f"float32_matmul() must say how each differs on {hardware.name!r}, got {declared}"
            )

    def test_every_level_has_a_reason(self, subject: Subject) -> None:
        """Each record has a DtypeSupport with its reason for bf16 and fp16, and no other dtype."""
        for hardware in subject.records:
            support = subject.backend.dtypes(hardware)
            assert set(LOW_PRECISION) <= set(support) <= {*LOW_PRECISION, torch.float32}, (
                f"dtypes() must answer for bfloat16 and float16, also where they are absent; "
                f"for {hardware.name!r} it answers for {sorted(map(str, support))}"
            )
            for dtype, answer in support.items():
                assert isinstance(answer, DtypeSupport), f"dtypes() maps {dtype} to {answer!r}"
                words = [word for word in answer.why.split() if any(map(str.isalpha, word))]
                assert len(words) > 1, (
                    f"why must be a phrase that a person reads: {dtype} on {hardware.name!r} "
                    f"says {answer.why!r}"
                )

    def test_every_record_gives_a_plan(self, subject: Subject) -> None:
        """``detect(hardware)`` chooses what the record can do, and explains it."""
        for hardware in subject.records:
            assert isinstance(subject.backend.scaler(hardware), ScalerSupport)
            plan = _front.detect(hardware)
            assert plan.support[plan.dtype].level != "absent"
            assert plan.use_scaler == (plan.dtype is torch.float16), (
                f"fp16 without a scaler on {hardware.name!r}: it would not be chosen"
            )
            assert hardware.name in plan.explain()
            json.dumps(plan.to_dict())

    @pytest.mark.parametrize("dtype", LOW_PRECISION, ids=_NAMES.get)
    def test_op_lists_name_real_ops(self, subject: Subject, dtype: torch.dtype) -> None:
        """Every op on the lists is one of torch's, once, and none is unclassified."""
        lists = subject.backend.op_lists(dtype)
        names = [op for op, _ in lists]
        assert len(names) == len(set(names)), "an op is on two lists"
        known = {base_name(op) for op in all_op_names()}
        mine = [op for op in names if "::" not in op]
        unknown = [op for op in mine if f"aten::{base_name(op)}" not in known]
        assert not unknown, f"torch {torch.__version__} has no ops {', '.join(unknown)}"
        reasons = {op: refusal(op, policy) for op, policy in lists if is_defined(op)}
        senseless = [f"{op}: {reason}" for op, reason in reasons.items() if reason]
        assert not senseless, f"the policy makes no sense for {'; '.join(senseless)}"
        wrong = {op: there for op in mine if (there := _instead_of(op, subject))}
        assert not wrong, "; ".join(
            f"torch has no overload {op!r}, so it would not be cast; it has {', '.join(there)}"
            for op, there in wrong.items()
        )
        assert not lists.unclassified, (
            f"the dispatcher casts these and the lists don't say how: {sorted(lists.unclassified)}"
        )

    def test_an_absent_device_is_an_error_with_its_reason(self, subject: Subject) -> None:
        """Naming what is not here says what was asked, why not or what there is, and no more."""
        before = torch_state(subject.device_type)
        if not subject.availability:
            asked, reason = subject.device_type, subject.availability.reason
        elif subject.backend.current_index() is None:  # it has no indices, so none can be missing
            asked, reason = f"{subject.device_type}x", repr(subject.device_type)
        else:
            asked, reason = f"{subject.device_type}:97", "97"
        with pytest.raises((DeviceNotAvailableError, UnknownDeviceError)) as error:
            plan = _front.detect(asked)
            pytest.fail(
                f"{asked!r} is not here, and detect() found {plan.hardware}: probe() must raise"
            )
        for part in (asked, reason):
            assert part in str(error.value), f"the error must say {part!r}: {error.value}"
        assert torch_state(subject.device_type) == before, "the error left torch's state changed"

    def test_an_impossible_dtype_is_an_error_with_what_there_is(self, subject: Subject) -> None:
        """Naming a dtype that the hardware lacks says what was asked, of whom, what it can, why."""
        for hardware in subject.records:
            with pytest.raises(UnsupportedPrecisionError, match="'bf16', 'fp16', 'fp32'"):
                _front.detect(hardware, precision="fp8")
            for dtype, answer in subject.backend.dtypes(hardware).items():
                if answer.level != "absent":
                    continue
                with pytest.raises(UnsupportedPrecisionError) as error:
                    _front.detect(hardware, precision=dtype)
                for part in (_NAMES[dtype], hardware.name, answer.why, "fp32"):
                    assert part in str(error.value), f"the error must say {part!r}: {error.value}"
