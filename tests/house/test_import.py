"""What importing amphal does, and what the package may not contain."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import amphal

PACKAGE = Path(amphal.__file__).parent
OUTSIDE = tempfile.gettempdir()  # in a checkout, ./amphal would shadow the installed package
# The front end: all of the package but what tests devices and what serves other libraries.
FRONT = [
    path
    for path in PACKAGE.rglob("*.py")
    if not {"testing", "integrations", "backends"} & set(path.relative_to(PACKAGE).parts)
]
DEVICES = {"cuda", "xpu", "mps", "cpu", "npu", "hpu", "xla", "mtia", "musa", "mlu", "rocm"}


def _fresh(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=OUTSIDE, check=True
    )
    return result.stdout


def test_import_loads_no_backend_and_no_heavy_module() -> None:
    """Backends are found at first use; vendors, Dynamo, rich and matplotlib stay out of import."""
    code = (
        "import sys, torch; before = set(sys.modules); import amphal, json;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = json.loads(_fresh(code))
    heavy = ("amphal.backends", "amphal.testing", "torch._dynamo", "rich", "matplotlib", "numpy")
    assert not [m for m in loaded if m.startswith(heavy)]
    assert "amphal" in loaded


def test_import_scans_no_entry_points() -> None:
    """The registry is empty until somebody asks."""
    assert _fresh("from amphal.contract import registry as r; print(r._rows)").strip() == "None"


def test_import_leaves_the_registry_and_the_plans_for_the_first_region() -> None:
    """A program that imports amphal and asks nothing of it does not pay for choosing."""
    code = "import sys, amphal; print([m for m in sys.modules if m.startswith('amphal.')])"
    loaded = _fresh(code)
    assert "amphal._autocast.autocast" in loaded
    assert not re.search(r"registry|_plan|choice|choose", loaded)


def test_the_first_use_may_be_in_a_compiled_function() -> None:
    """Dynamo traces a region although nothing that validates it was loaded before."""
    code = (
        "import torch, amphal\n"
        "x = torch.ones(2, 2)\n"
        "@torch.compile(backend='eager', fullgraph=True)\n"
        "def f(x):\n"
        "    with amphal.autocast('cpu', 'bf16'):\n"
        "        return x @ x\n"
        "print(f(x).dtype)\n"
    )
    assert _fresh(code).strip() == "torch.bfloat16"


def test_all_is_exactly_the_public_names_and_sorted() -> None:
    """__all__ holds every public name of the package, in order, and nothing else."""
    assert amphal.__all__ == sorted(amphal.__all__)
    public = {
        name
        for name in dir(amphal)
        if not name.startswith("_")
        and not isinstance(getattr(amphal, name), type(sys))
        and name not in ("annotations", "Any", "TYPE_CHECKING")
    }
    assert public == set(amphal.__all__)


def test_no_module_is_named_like_a_public_callable() -> None:
    """A sub-package of that name would shadow it."""
    modules = {p.stem for p in PACKAGE.glob("*.py")} | {p.name for p in PACKAGE.iterdir()}
    # Files of a private package may be: amphal.tune is no path to amphal/_tune/tuning.py.
    assert not modules & set(amphal.__all__)
    assert "backends" not in amphal.__all__


def test_the_front_end_names_no_device() -> None:
    """What differs by device is declared by its backend: no string in the front end is one.

    ``_torch/private.py`` names two device types that torch knows and nobody has, to leave a
    mark there.
    """
    named = []
    assert len(FRONT) > 50
    for path in FRONT:
        if path == PACKAGE / "_torch" / "private.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named += [
            f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value!r}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.split(":")[0].lower() in DEVICES
        ]
    assert not named


def test_the_top_level_backends_folder_cannot_be_a_second_copy() -> None:
    """Imported under its folder's name, the package refuses: its backends would be unequal."""
    root = Path(__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import backends"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=OUTSIDE
    )
    assert result.returncode != 0
    assert "import amphal.backends" in result.stderr


def test_the_error_tree_is_drawn_in_its_docstring() -> None:
    """Every error class stands in the drawing."""
    from amphal import errors

    classes = [n for n in errors.__all__ if isinstance(getattr(errors, n), type)]
    assert all(name in (errors.__doc__ or "") for name in classes)
    assert set(errors.__all__) - {"did_you_mean"} == set(classes)


def test_only_torch_amp_is_used() -> None:
    """The vendor namespaces warn (torch.cuda.amp) or are gone (torch.xpu.amp): none is named."""
    sources = [*PACKAGE.rglob("*.py"), *(Path(__file__).parents[2] / "backends").glob("*.py")]
    code = [
        (path.name, node)
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]
    old = [
        f"{name}:{node.lineno}"
        for name, node in code
        if isinstance(node, ast.Attribute)
        and node.attr == "amp"
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in DEVICES
    ]
    assert not old


def test_autocast_queries_always_name_the_device() -> None:
    """A vendor's plug-in may patch the query without a device to mean its own."""
    queries = {"is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled"}
    bare = [
        f"{path.name}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in queries
        and not node.args
    ]
    assert not bare


def test_no_future_warning() -> None:
    """Import, a region, a scaler: nothing deprecated is touched."""
    code = (
        "import warnings; warnings.simplefilter('error', FutureWarning);"
        "warnings.simplefilter('error', DeprecationWarning); import torch, amphal\n"
        "with amphal.autocast(): pass\n"
        "amphal.GradScaler(); print('ok')"
    )
    assert _fresh(code).strip() == "ok"
