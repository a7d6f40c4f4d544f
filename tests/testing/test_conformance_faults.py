"""The conformance suite can fail: each fault is caught by the check that is named for it."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from helpers.plugins.distribution import backend_source, distribution, python

from amphal.testing._device import why_not_installable

HELPERS = Path(__file__).parents[1] / "helpers"

# The fault (a class of helpers/plugins/wrong_backends.py): the check that must fail.
CAUGHT_BY = {
    "AvailableRaises": "test_available_never_raises",
    "AvailableIsTrue": "test_available_never_raises",
    "AvailableImportsUnguarded": "test_available_never_raises",
    "ProbeCounts": "test_probe_reads_facts",
    "ProbeOfAnotherType": "test_probe_reads_facts",
    "IndexIsText": "test_current_index_is_one_that_probe_knows",
    "IndexIsForgotten": "test_current_index_is_one_that_probe_knows",
    "DtypesReadTheEnvironment": "test_answers_about_hardware_are_pure[dtypes]",
    "DtypesCount": "test_answers_about_hardware_are_pure[dtypes]",
    "ScalerReadsThePlatform": "test_answers_about_hardware_are_pure[scaler]",
    "OpListsCount": "test_op_lists_are_pure[bf16]",
    "OpListsChangeTorch": "test_op_lists_are_pure[bf16]",
    "OpListsOverlap": "test_op_lists_name_real_ops[bf16]",
    "OneDtypeIsMissing": "test_every_level_has_a_reason",
    "AReasonIsNoPhrase": "test_every_level_has_a_reason",
    "ScalerIsATuple": "test_every_record_gives_a_plan",
    "AnOpDoesNotExist": "test_op_lists_name_real_ops[bf16]",
    "AnOpIsUnclassified": "test_op_lists_name_real_ops[bf16]",
    "AnOpIsForgotten": "test_op_lists_are_true_for_the_dispatcher[bf16]",
    "APolicyIsWrong": "test_every_listed_op_follows_its_policy[bf16]",
    "ACommonPolicyIsWrong": "test_autocast_casts_as_declared[bf16]",
    "ABanIsInvented": "test_a_banned_op_is_refused[bf16]",
    "OverflowIsDenied": "test_the_scaler_facts_are_true",
    "VendorScalerIsNoClass": "test_the_vendor_scaler_is_a_scaler",
    "SynchronizeRaises": "test_synchronize_waits",
    "TheScalerNeverSkips": "test_the_scaler_trains_through_an_overflow",
    "TheScalerTellsNobody": "test_the_scaler_trains_through_an_overflow",
    "TheScalerForgets": "test_state_moves_to_the_cpu_and_back",
    "DtypesReadAFile": "test_answers_about_hardware_are_pure[dtypes]",
    "DtypesAskTorch": "test_answers_about_hardware_are_pure[dtypes]",
    "DtypesAskCuda": "test_answers_about_hardware_are_pure[dtypes]",
    "DtypesReadTorchsVersion": "test_answers_about_hardware_are_pure[dtypes]",
    "DtypesReadThePlatform": "test_answers_about_hardware_are_pure[dtypes]",
    "DtypesCountCores": "test_answers_about_hardware_are_pure[dtypes]",
    "DtypesSetAVariable": "test_answers_about_hardware_are_pure[dtypes]",
    "DtypesSetThePrecision": "test_answers_about_hardware_are_pure[dtypes]",
    "AReasonIsNoWord": "test_every_level_has_a_reason",
    "AvailableSeeds": "test_available_never_raises",
    "ProbeSetsTheDefaultDtype": "test_probe_reads_facts",
    "ProbeOfTheCurrentIsAnother": "test_current_index_is_one_that_probe_knows",
    "IndexIsNegative": "test_current_index_is_one_that_probe_knows",
    "AnOverloadIsLeftOut": "test_op_lists_name_real_ops[bf16]",
    "APolicyMakesNoSense": "test_op_lists_name_real_ops[bf16]",
}

# Faults that leave more than one check nothing to stand on; every other fails few.
WIDE = {
    "IndexIsText",
    "OneDtypeIsMissing",
    "OpListsOverlap",
    "ProbeOfAnotherType",
    "ScalerIsATuple",
}


def _failures(report: Path) -> dict[str, set[str]]:
    """By test class, the checks that failed in a JUnit report."""
    failed: dict[str, set[str]] = {}
    for case in ET.parse(report).iter("testcase"):
        name = case.attrib["classname"].rpartition(".")[2].removeprefix("Test")
        failed.setdefault(name, set())
        if case.find("failure") is not None or case.find("error") is not None:
            failed[name].add(case.attrib["name"])
    return failed


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What fails when pytest runs the suite over all wrong backends."""
    folder = tmp_path_factory.mktemp("faults")
    report, wrong = folder / "report.xml", str(HELPERS / "plugins" / "wrong_backends.py")
    # The slowest check runs for its own fault alone.
    only = ("-k", "not every_listed_op or APolicyIsWrong")
    options = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--tb=no", *only)
    done = python(folder, "-m", "pytest", *options, f"--rootdir={folder}", wrong)
    assert done.returncode == 1, done.stdout + done.stderr
    return _failures(report)


@pytest.mark.parametrize("fault", CAUGHT_BY)
def test_a_fault_is_caught_by_its_check(failures: dict[str, set[str]], fault: str) -> None:
    """A backend that is wrong in one way fails the check for it, and not most of the suite."""
    assert CAUGHT_BY[fault] in failures[fault]
    if fault not in WIDE:
        assert len(failures[fault]) <= 8, sorted(failures[fault])


def test_every_wrong_backend_is_listed_here(failures: dict[str, set[str]]) -> None:
    """No fault runs without an expectation."""
    assert set(failures) == set(CAUGHT_BY)


def _suite(folder: Path, name: str) -> str:
    options = ("-q", "-p", "no:cacheprovider", f"--rootdir={folder}", "--amphal-backend", name)
    done = python(folder, "-m", "pytest", "--pyargs", "amphal.testing", *options)
    return done.stdout + done.stderr


def test_a_vendor_import_at_import_time_is_caught(tmp_path: Path) -> None:
    """A plug-in whose module imports another package at its top fails the check for it."""
    source = "import pluggy\n" + backend_source("eager", ok=False)
    distribution(tmp_path, "eager", source, {"eager": "eager:BACKEND"})
    said = _suite(tmp_path, "eager")
    assert "test_importing_it_imports_no_vendor_module" in said.partition("FAILED")[2]
    assert "['pluggy']" in said


def test_a_plug_in_of_an_absent_device_passes_what_can_be_asked(tmp_path: Path) -> None:
    """The summary of the command line says how each check was proven, and what was not."""
    distribution(tmp_path, "away", backend_source("away", ok=False), {"away": "away:BACKEND"})
    said = _suite(tmp_path, "away")
    assert "how each check was proven" in said
    assert "by asking" in said
    assert "away, not proven: no such hardware" in said


def test_the_command_line_names_the_backends_there_are(tmp_path: Path) -> None:
    """Without the option, or with an unknown name, one line says which names there are."""
    for name in ("", "no-such-device"):
        said = _suite(tmp_path, name)
        assert "cpu" in said
        assert "ERROR: " in said


_needs_toy = pytest.mark.skipif(bool(why_not_installable()), reason=why_not_installable())


def _gaps(folder: Path, name: str) -> tuple[set[str], str]:
    """What fails in one class of gaps.py, and what the suite says.

    A process of its own, since the casts that a first region installs stay.
    """
    report, file = folder / "report.xml", str(HELPERS / "plugins" / "gaps.py")
    which = "autocast_casts_as_declared or a_model_trains_in or trains_through_an_overflow"
    options = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-k", which)
    done = python(folder, "-m", "pytest", *options, f"--rootdir={folder}", f"{file}::Test{name}")
    return _failures(report)[name], done.stdout


@_needs_toy
def test_ops_that_a_device_lacks_are_all_named(tmp_path: Path) -> None:
    """The first gap hides neither the second nor what the other ops do; no check fails for it."""
    failed, said = _gaps(tmp_path, "TwoOpsAreMissing")
    assert failed == set()
    assert "toy, on the device, 34 ops; it lacks gelu, tanh:" in said
    assert "5 proven, 0 not proven\n" in said


@_needs_toy
def test_a_region_that_casts_no_layer_is_caught(tmp_path: Path) -> None:
    """Training in bf16's name that computes in float32 fails, and is counted; nothing else does.

    In particular the overflow is one whatever the lists say.
    """
    failed, said = _gaps(tmp_path, "LayersStayFloat32")
    assert failed == {"test_a_model_trains_in[bf16]", "test_a_model_trains_in[fp16]"}
    assert "no layer gave torch.bfloat16, only {torch.float32}" in said
    assert "3 proven, 0 not proven, 2 failed\n" in said
