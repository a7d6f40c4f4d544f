"""A plug-in that is broken in any way is one clear row, and everything else works."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.plugins.distribution import backend_source, distribution, python

# name: (source of the module, what its entry point names, what the row must say)
BROKEN_WHEN_LOADED = {
    "imports-nothing": ("import no_such_vendor", "BACKEND", "No module named 'no_such_vendor'"),
    "missing-library": ("raise OSError('libvendor.so: cannot open')", "BACKEND", "libvendor.so"),
    "syntax-error": ("def available(:", "BACKEND", "SyntaxError"),
    "exits": ("raise SystemExit('the driver is too old')", "BACKEND", "the driver is too old"),
    "no-such-name": ("backend = 1", "BACKEND", "BACKEND"),
    "not-a-backend": (
        "BACKEND = {'device_type': 'x'}",
        "BACKEND",
        "is dict, not an amphal.contract",
    ),
    "wrong-type": (
        backend_source("wrong_type", "BACKEND = backend(dtypes={})"),
        "BACKEND",
        "dtypes must be a function, got {}",
    ),
    "wrong-name": (
        backend_source("another"),
        "BACKEND",
        "the entry point is named 'wrong_name' and its backend 'another'",
    ),
    "bad-name": (backend_source("cuda:0"), "BACKEND", "device_type must be a torch device type"),
    "overlap": (
        backend_source("overlap", "OpLists(lower_precision={'mm'}, fp32={'mm'})"),
        "BACKEND",
        "'mm' is in both lower_precision and fp32",
    ),
    "older-contract": (
        backend_source("older_contract", "BACKEND = backend(contract=0)"),
        "BACKEND",
        "was written for contract 0, this amphal speaks contract 1",
    ),
    "unknown-field": (
        backend_source("unknown_field", "BACKEND = backend(fp8=True)"),
        "BACKEND",
        "fp8",
    ),
    "panics": (  # an extension in Rust raises what is no Exception
        "class PanicException(BaseException): pass\nraise PanicException('index out of bounds')",
        "BACKEND",
        "PanicException: index out of bounds",
    ),
    "asks-at-import": ("import amphal\namphal.detect()", "BACKEND", "while it was being imported"),
}

# These load, and break when they are asked: name, last lines, what detect(name) must say.
BROKEN_WHEN_ASKED = {
    "raises": (
        "def available(): raise RuntimeError('driver mismatch')\n"
        "BACKEND = backend(available=available)",
        "available() of the backend raised RuntimeError: driver mismatch",
    ),
    "says-true": (
        "BACKEND = backend(available=lambda: True)",
        "returned True, not an Availability",
    ),
    "no-reason": (
        "BACKEND = backend(available=lambda: Availability(False))",
        "Availability(False) needs a reason",
    ),
    "probe-raises": (
        "def probe(index): raise OSError('no such device node')\nBACKEND = backend(probe=probe)",
        "could not be probed: OSError: no such device node",
    ),
    "probe-lies": (
        "BACKEND = backend(probe=lambda index: Hardware('cpu', 'a CPU'))",
        "must return an amphal.Hardware of that device type",
    ),
    "dtypes-raise": (
        "def dtypes(hw): return {}['x']\nBACKEND = backend(dtypes=dtypes)",
        "failed on 'the dtypes_raise device': KeyError",
    ),
    "dtypes-lie": (
        "BACKEND = backend(dtypes=lambda hw: {torch.bfloat16: True})",
        "must map bfloat16 and float16 to a DtypeSupport",
    ),
    "scaler-lies": (
        "BACKEND = backend(priority=500, scaler=lambda hw: None)",
        "answer scaler() with a ScalerSupport",
    ),
    "dtypes-fail-first": (
        "def dtypes(hw): raise RuntimeError('no table')\n"
        "BACKEND = backend(priority=501, dtypes=dtypes)",
        "failed on 'the dtypes_fail_first device': RuntimeError: no table",
    ),
    "dtypes-exit": (
        "def dtypes(hw): raise SystemExit('no licence')\nBACKEND = backend(dtypes=dtypes)",
        "failed on 'the dtypes_exit device': SystemExit: no licence",
    ),
    "unprintable": (
        "class Odd(Exception):\n    def __str__(self): raise RuntimeError\n    __repr__ = __str__\n"
        "BACKEND = backend(dtypes=lambda hw: {torch.bfloat16: Odd()})",
        "got a dict that cannot be printed",
    ),
    "no-fp32": (
        "no = DtypeSupport('absent', False, 'x y')\n"
        "BACKEND = backend(dtypes=lambda hw: {torch.float32: no})",
        "has no float32",
    ),
    "index-fails-first": (
        "def index(): raise SystemExit('no context')\n"
        "BACKEND = backend(priority=502, current_index=index)",
        "current_index() of the backend 'index_fails_first' raised SystemExit: no context",
    ),
    "index-is-text": (
        "BACKEND = backend(current_index=lambda: '0')",
        "must return an int or None, got '0'",
    ),
    "available-panics": (
        "class PanicException(BaseException): pass\n"
        "def available(): raise PanicException('index out of bounds')\n"
        "BACKEND = backend(available=available)",
        "available() of the backend raised PanicException: index out of bounds",
    ),
    "asks-itself": (
        "import amphal\n"
        "def available(): amphal.detect('asks_itself'); return Availability(True)\n"
        "BACKEND = backend(available=available)",
        "asked amphal about its own device while it was answering",
    ),
    "probe-asks-itself": (
        "import amphal\n"
        "BACKEND = backend(probe=lambda index: amphal.detect('probe_asks_itself').hardware)",
        "asked amphal about its own device while it was answering",
    ),
    "dtypes-ask-amphal": (
        "import amphal\nBACKEND = backend(dtypes=lambda hw: amphal.detect(hw).support)",
        "asked amphal about its own device while it was answering",
    ),
}

_ASK = """
import json, amphal
rows = {n: {"source": r.source, "ok": r.backend is not None, "error": r.error}
        for n, r in amphal.contract.registered_backends().items()}
errors = {}
for name in rows:
    try:
        amphal.detect(name)
    except amphal.AmphalError as error:
        errors[name] = f"{type(error).__name__}: {error}"
    except Exception as error:
        errors[name] = f"NOT OURS {type(error).__name__}: {error}"
stranger = {}
for name in ("op_lists", "autocast"):
    try:
        getattr(amphal, name)("stranger", "bf16")
    except Exception as error:
        stranger[name] = f"{type(error).__name__}: {error}"
print(json.dumps({"rows": rows, "errors": errors, "detect": str(amphal.detect().device),
                  "why": amphal.detect().explain(), "stranger": stranger,
                  "fine": str(amphal.contract.get_backend("fine").probe(0).name)}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process says that has all of the broken plug-ins, and a sound one, installed."""
    folder = tmp_path_factory.mktemp("site")
    for name, (source, attribute, _) in BROKEN_WHEN_LOADED.items():
        module = name.replace("-", "_")
        key = "cuda:0" if name == "bad-name" else module
        distribution(folder, name, source, {key: f"{module}:{attribute}"})
    for name, (last, _) in BROKEN_WHEN_ASKED.items():
        module = name.replace("-", "_")
        distribution(folder, name, backend_source(module, last), {module: f"{module}:BACKEND"})
    distribution(folder, "fine", backend_source("fine"), {"fine": "fine:BACKEND"})
    source = backend_source("stranger", "BACKEND = backend(priority=999)")
    distribution(folder, "stranger", source, {"stranger": "stranger:BACKEND"})
    distribution(folder, "a-cpu-too", backend_source("cpu"), {"cpu": "a_cpu_too:BACKEND"})
    for name in ("one-twin", "other-twin"):
        module = name.replace("-", "_")
        distribution(folder, name, backend_source("twin"), {"twin": f"{module}:BACKEND"})
    distribution(folder, "bad-value", backend_source("bad_value"), {"bad_value": "not a module!"})
    done = python(folder, "-c", _ASK)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", BROKEN_WHEN_LOADED)
def test_a_plug_in_that_cannot_be_loaded_is_a_row_with_the_reason(
    answers: dict[str, Any], name: str
) -> None:
    """The row names the distribution and the cause, and naming the device raises the same."""
    key = "cuda:0" if name == "bad-name" else name.replace("-", "_")
    row = answers["rows"][key]
    assert not row["ok"]
    assert row["source"] == f"{name} 1.0"
    assert BROKEN_WHEN_LOADED[name][2] in row["error"]
    if name != "bad-name":
        assert answers["errors"][key].startswith("BackendError")
        assert row["error"] in answers["errors"][key]


@pytest.mark.parametrize("name", BROKEN_WHEN_ASKED)
def test_a_plug_in_that_breaks_when_asked_says_so(answers: dict[str, Any], name: str) -> None:
    """It is registered, and naming its device raises amphal's error with the cause."""
    key = name.replace("-", "_")
    assert answers["rows"][key]["ok"]
    assert not answers["errors"][key].startswith("NOT OURS")
    assert BROKEN_WHEN_ASKED[name][1] in answers["errors"][key]


def test_a_device_that_torch_does_not_know_is_only_used_by_name(answers: dict[str, Any]) -> None:
    """A backend of highest priority whose extension gave torch no device is passed over."""
    assert answers["rows"]["stranger"]["ok"]
    assert "stranger" not in answers["errors"]
    assert answers["detect"].split(":")[0] in ("cpu", "cuda", "xpu", "mps")
    assert "torch has no device type 'stranger' here" in answers["why"]


@pytest.mark.parametrize("what", ["op_lists", "autocast"])
def test_lists_of_a_device_that_torch_does_not_know_are_our_error(
    answers: dict[str, Any], what: str
) -> None:
    """Asking for its op lists, or for a region on it, says that torch has no autocast for it."""
    assert answers["stranger"][what].startswith("ArgumentError: torch has no autocast for device")


def test_a_malformed_entry_point_is_a_row(answers: dict[str, Any]) -> None:
    """An entry point whose value is no object reference fails alone."""
    assert not answers["rows"]["bad_value"]["ok"]
    assert answers["rows"]["bad_value"]["source"] == "bad-value 1.0"


def test_a_built_in_backend_keeps_its_name(answers: dict[str, Any]) -> None:
    """A stranger that claims "cpu" is refused, and the row says who has it."""
    assert answers["rows"]["cpu"]["source"].startswith("amphal ")
    refused = answers["rows"]["cpu [a-cpu-too 1.0]"]
    assert "'cpu' is already taken by amphal" in refused["error"]
    assert "uninstall" in refused["error"]


def test_of_two_plug_ins_with_one_name_none_is_taken(answers: dict[str, Any]) -> None:
    """Neither the alphabet nor sys.path decides: the error names both."""
    row = answers["rows"]["twin"]
    assert not row["ok"]
    assert row["source"] == "one-twin 1.0 and other-twin 1.0"
    assert row["error"] == (
        "2 distributions bring a backend for 'twin': one_twin:BACKEND of one-twin 1.0 and "
        "other_twin:BACKEND of other-twin 1.0; uninstall all but one"
    )
    assert row["error"] in answers["errors"]["twin"]


def test_everything_else_works_beside_broken_plug_ins(answers: dict[str, Any]) -> None:
    """detect() finds this machine's device, and the built-in backends and a sound one answer."""
    assert answers["detect"].split(":")[0] in ("cpu", "cuda", "xpu", "mps")
    assert answers["fine"] == "the fine device"
    for name in ("cuda", "xpu", "mps", "cpu"):
        assert answers["rows"][name]["ok"]
    assert "cpu" not in answers["errors"]


def test_import_amphal_loads_no_backend(tmp_path: Any) -> None:
    """A plug-in that raises at import is not noticed by ``import amphal``."""
    distribution(tmp_path, "exits", "raise SystemExit(3)", {"exits": "exits:BACKEND"})
    code = (
        "import sys, amphal; print([m for m in sys.modules if m in ('exits', 'amphal.backends')])"
    )
    done = python(tmp_path, "-c", code)
    assert done.stdout.strip() == "[]", done.stderr


_NAMED = """
import sys, amphal
from amphal.errors import AmphalError
assert amphal.detect("cpu").device.type == "cpu"
amphal.autocast("cpu", dtype="bf16")
amphal.GradScaler(amphal.detect("cpu"))
amphal.op_lists("cpu")
for named in ("nowhere", "quiet"):
    print([m for m in sys.modules if m in ("loud", "quiet")])
    try:
        print(amphal.detect(named).device)
    except AmphalError as error:
        print(error)
print([m for m in sys.modules if m in ("loud", "quiet")])
"""


def test_naming_a_device_imports_no_other_plug_in(tmp_path: Any) -> None:
    """A plug-in that ends the process costs nothing where another device is named.

    Nor does an error message import it: it says which plug-ins were not asked.
    """
    for name, first in (("loud", "import os; os._exit(9)"), ("quiet", "")):
        source = f"{first}\n{backend_source(name, ok=False)}"
        distribution(tmp_path, name, source, {name: f"{name}:BACKEND"})
    done = python(tmp_path, "-c", _NAMED, AMPHAL_DEVICE="", AMPHAL_PRECISION="")
    assert done.returncode == 0, done.stderr
    modules, nowhere, still, quiet, after = done.stdout.splitlines()
    assert (modules, still, after) == ("[]", "[]", "['quiet']")
    assert "registered: cpu, cuda, loud, mps, quiet, xpu" in nowhere
    assert "not available here: no such hardware" in quiet
    assert "(not asked, since not named: loud)" in quiet


def test_a_plug_in_may_name_another_device_at_import(tmp_path: Any) -> None:
    """A plug-in may name another device while it is imported; its own is an error."""
    source = "import amphal\namphal.detect('cpu')\n" + backend_source("polite")
    distribution(tmp_path, "polite", source, {"polite": "polite:BACKEND"})
    done = python(tmp_path, "-c", "import amphal; print(amphal.detect('polite').device.type)")
    assert done.stdout.strip() == "privateuseone", done.stderr


def test_the_command_line_shows_each_broken_plug_in_once(tmp_path: Any) -> None:
    """``amphal detect`` has one row for it, with the reason, and succeeds."""
    distribution(tmp_path, "broken", "import no_such_vendor", {"broken": "broken:BACKEND"})
    done = python(tmp_path, "-m", "amphal", "detect", "--json")
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    assert done.stdout.count("no_such_vendor") == 1
