"""The house: packages with one door each, imports downward only, no circle."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "amphal"

FLOORS = [
    {"errors", "_environment", "_version", "_warnings"},
    {"_torch"},
    {"contract"},
    {"_casting", "_choice", "backends"},
    {"_autocast", "_scaler"},
    {"_front"},
    {"_precast", "_trace", "_tune", "integrations", "testing"},
    {"_doctor"},
    {"_cli"},
    {"amphal", "__main__"},
]
"""The rooms from the ground up. A room imports from lower floors only, and from itself."""

FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    """``amphal._scaler.step`` is in ``_scaler``; the front door is ``amphal``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "amphal"


def sources(package: Path, backends: Path | None) -> Iterator[tuple[str, Path]]:
    """Every module with its file. An ``__init__`` has the name of its package."""
    for path in sorted(package.rglob("*.py")):
        parts = ("amphal", *path.relative_to(package).with_suffix("").parts)
        yield ".".join(parts).removesuffix(".__init__"), path
    for path in sorted(backends.glob("*.py")) if backends else ():
        yield f"amphal.backends.{path.stem}".removesuffix(".__init__"), path


def imports(module: str, path: Path, known: set[str]) -> Iterator[tuple[int, str]]:
    """What a module imports of amphal, with the line; inside functions and for typing too."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                if full in known or base in known:
                    yield node.lineno, full if full in known else base
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name in known)


def upward(package: Path, backends: Path | None = None) -> list[str]:
    """The imports that go up or across, each with its file and line."""
    modules = dict(sources(package, backends))
    found = []
    for module, path in modules.items():
        here = room_of(module)
        for line, target in imports(module, path, set(modules)):
            there = room_of(target)
            if here != there and FLOOR_OF[there] >= FLOOR_OF[here]:
                found.append(f"{path.name}:{line}: {here} imports {there} ({target})")
    return found


def circles(package: Path, backends: Path | None = None) -> list[str]:
    """The modules that import themselves by way of others."""
    modules = dict(sources(package, backends))
    arrows = {m: {t for _, t in imports(m, p, set(modules))} - {m} for m, p in modules.items()}
    while leaves := [m for m, to in arrows.items() if not to & arrows.keys()]:
        for leaf in leaves:
            del arrows[leaf]
    return sorted(arrows)


def past_the_door(package: Path, backends: Path | None = None) -> list[str]:
    """The imports of a room's files, or of names that its ``__init__`` does not hand out."""
    modules = dict(sources(package, backends))
    doors: dict[str, set[str]] = {}
    found = []
    for module, path in modules.items():
        package_of = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                bases = [(a.name, set[str]()) for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package_of.split(".")[: 1 - node.level or None] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                bases = [(base, {a.name for a in node.names})]
            else:
                continue
            for base, names in bases:
                there = room_of(base)
                door = modules.get(f"amphal.{there}")
                if not base.startswith("amphal.") or there == room_of(module):
                    continue
                if door is None or door.name != "__init__.py":
                    continue
                if there not in doors:
                    doors[there] = handed_out(door)
                if base != f"amphal.{there}" or names - doors[there]:
                    found.append(f"{path.name}:{node.lineno}: {base} {sorted(names)}")
    return found


def handed_out(door: Path) -> set[str]:
    """The names in ``__all__`` and those imported as themselves (``X as X``)."""
    names: set[str] = set()
    for node in ast.parse(door.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names |= set(ast.literal_eval(node.value))
        elif isinstance(node, ast.ImportFrom):
            names |= {a.name for a in node.names if a.asname == a.name}
    return names


def test_every_room_has_a_floor() -> None:
    """A new package or file below amphal/ is given its floor here before it is imported."""
    rooms = {room_of(module) for module, _ in sources(PACKAGE, ROOT / "backends")}
    assert rooms - {"data"} == FLOOR_OF.keys()


def test_imports_go_downward_only() -> None:
    """No arrow up and none across, those inside functions and under TYPE_CHECKING counted."""
    assert not upward(PACKAGE, ROOT / "backends")


def test_no_circle_of_modules() -> None:
    """Inside a room too."""
    assert not circles(PACKAGE, ROOT / "backends")


def test_a_room_is_entered_by_its_door() -> None:
    """Other rooms import from a package, never from its files, and only what its door lists."""
    assert not past_the_door(PACKAGE, ROOT / "backends")


@pytest.mark.parametrize(
    "line",
    ["from ._scaler.step import x", "from ._scaler import hidden", "import amphal._scaler.step"],
)
def test_an_import_past_the_door_is_found(tmp_path: Path, line: str) -> None:
    """Of a file, of a name that the door does not list, by the full name."""
    (tmp_path / "_scaler").mkdir()
    (tmp_path / "_scaler" / "__init__.py").write_text('from .step import hidden\n__all__ = ["x"]')
    (tmp_path / "_scaler" / "step.py").touch()
    (tmp_path / "__init__.py").touch()
    (tmp_path / "_front.py").write_text(line)
    assert len(past_the_door(tmp_path)) == 1
    (tmp_path / "_front.py").write_text("from ._scaler import x")
    assert not past_the_door(tmp_path)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("_scaler/deep/step.py", "def f():\n    from ..._front import detect"),
        (
            "contract/records.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .. import _front",
        ),
        ("_torch/private.py", "import amphal._front"),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, file: str, line: str) -> None:
    """Planted in a sub-folder, in a function, for typing, by its full name."""
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / "_front.py").touch()
    (tmp_path / "__init__.py").touch()
    (tmp_path / file).write_text(line)
    assert len(upward(tmp_path)) == 1


def test_a_circle_is_found(tmp_path: Path) -> None:
    """Two files of one room that import each other."""
    for here, there in ("ab", "ba"):
        (tmp_path / f"{here}.py").write_text(f"from . import {there}")
    assert circles(tmp_path) == ["amphal.a", "amphal.b"]


def test_the_rooms_say_what_they_are_for() -> None:
    """Every package has a docstring of its own."""
    for init in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))), init


def test_built_in_backends_import_the_contract_alone() -> None:
    """As a plug-in does: everything of amphal that they use is in amphal.contract."""
    foreign = [
        f"{path.name}:{line}: {target}"
        for module, path in sources(PACKAGE, ROOT / "backends")
        if room_of(module) == "backends"
        for line, target in imports(module, path, {m for m, _ in sources(PACKAGE, None)})
        if target not in ("amphal.contract", "amphal.backends")
    ]
    assert not foreign


def test_the_distribution_has_every_folder() -> None:
    """The list of packages is written by hand, because backends/ is mapped from the top level."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    folders = {
        ".".join(("amphal", *init.parent.relative_to(PACKAGE).parts))
        for init in PACKAGE.rglob("*.py")
    }
    assert listed == folders | {"amphal.backends", "amphal.data"}


def test_the_architecture_page_has_this_floor_plan() -> None:
    """docs/architecture.md has the same floors, the highest on top, and no package is missing."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", page, re.MULTILINE)
    shown = {int(floor): set(re.findall(r"`(\w+)`", rooms)) for floor, rooms in rows}
    assert shown == dict(enumerate(FLOORS))
    assert [int(floor) for floor, _ in rows] == sorted(shown, reverse=True)
