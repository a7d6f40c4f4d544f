"""What the text of a script says: the devices that it names."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from .findings import Finding

__all__ = ["named_devices"]

_TAKES_DEVICE = frozenset(
    ["to", "device", "autocast", "GradScaler", "set_default_device", "Generator"]
)


def named_devices(path: Path, devices: Iterable[str], host: str) -> Iterator[Finding]:
    """Calls in which a device is a literal: ``.to("cuda")``, ``device="cuda"``, ``.cuda()``.

    A device that is written once as a default of a parameter, an option or an environment variable
    is not one: it can be chosen from outside. Moving a result to the ``host`` is none either.
    """
    kinds = frozenset(devices)
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = name or (node.func.id if isinstance(node.func, ast.Name) else "")
        if name in kinds - {host} and isinstance(node.func, ast.Attribute) and not node.args:
            yield Finding("device-in-the-code", f"{path}:{node.lineno}", f".{name}()")
            continue
        given = [k.value for k in node.keywords if k.arg in ("device", "device_type")]
        if name in _TAKES_DEVICE:
            given += node.args[:1]
        for value in given:
            text = value.value if isinstance(value, ast.Constant) else None
            kind = text.partition(":")[0] if isinstance(text, str) else ""
            if kind in kinds and not (kind == host and name == "to"):
                yield Finding("device-in-the-code", f"{path}:{node.lineno}", repr(text))
