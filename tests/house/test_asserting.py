"""Every test asserts something on every path: none can pass without a look at a value."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for folder in ("tests", "amphal/testing", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def within(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of this function itself: what a function defined in it does is not its own."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, SCOPES):
            yield from within(child)


def is_assertion(node: ast.AST) -> bool:
    """``assert``, pytest's ``raises``, ``warns`` and ``fail``, or a helper named for it."""
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.Assert)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in {"raises", "warns", "fail"} or name.startswith(("assert_", "check"))


def always_asserts(body: list[ast.stmt]) -> bool:
    """Whether every path through these statements asserts. A loop counts as run."""
    return any(map(asserts, body))


def asserts(statement: ast.stmt) -> bool:
    if isinstance(statement, SCOPES):
        return False
    if isinstance(statement, ast.If):
        return always_asserts(statement.body) and always_asserts(statement.orelse)
    if isinstance(statement, ast.With | ast.AsyncWith):
        heads = [n for item in statement.items for n in within(item)]
        return any(map(is_assertion, heads)) or always_asserts(statement.body)
    if isinstance(statement, ast.For | ast.AsyncFor | ast.While):
        return always_asserts(statement.body)
    if isinstance(statement, ast.Try):
        return always_asserts([*statement.body, *statement.finalbody])
    return any(map(is_assertion, within(statement)))


def weak_tests(source: str) -> Iterator[tuple[int, str]]:
    """The tests that may pass without an assertion, each with its line and what is wrong."""
    for test in ast.walk(ast.parse(source)):
        if not isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not test.name.startswith("test_"):
            continue
        for statement in test.body:
            if isinstance(statement, SCOPES):
                continue
            for node in within(statement):
                if isinstance(node, ast.Return):
                    yield node.lineno, f"{test.name} returns before its end; parametrize it"
        if not always_asserts(test.body):
            yield test.lineno, f"{test.name} has a path without an assertion"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_test_of_this_file_asserts(path: Path) -> None:
    """No early return, and an assertion on every path."""
    found = weak_tests(path.read_text(encoding="utf-8"))
    assert [f"{path.name}:{line}: {what}" for line, what in found] == []


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "run()",
        "if device:\n  return\n assert True",
        "if device:\n  assert True",
        "if device:\n  with pytest.raises(ValueError):\n   run()",
        "def inner():\n  assert True\n inner()",
        "try:\n  run()\n except ValueError:\n  assert True",
    ],
)
def test_a_weak_test_is_found(body: str) -> None:
    """The rule can fail."""
    assert list(weak_tests(f"def test_x():\n {body}"))


@pytest.mark.parametrize(
    "body",
    [
        "assert run()",
        "with pytest.raises(ValueError):\n  run()",
        "with region():\n  assert run()",
        "if device:\n  assert run()\n else:\n  check_absent()",
        "for x in y:\n  torch.testing.assert_close(x, 1)",
        "def inner():\n  return 1\n assert inner()",
        "try:\n  assert run()\n finally:\n  stop()",
    ],
)
def test_a_test_that_asserts_is_not_found(body: str) -> None:
    """The rule lets pass what asserts on every path."""
    assert list(weak_tests(f"def test_x():\n {body}")) == []
