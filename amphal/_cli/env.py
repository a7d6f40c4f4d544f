"""``amphal env [--json]``: a block for a bug report."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata
from typing import Any

import torch

from .._version import __version__
from ..contract import registry
from . import output

__all__ = ["add", "run"]

_BESIDE = ("accelerate", "lightning", "transformers", "deepspeed", "torch_xla", "torch_npu")


def add(commands: Any) -> None:
    """Add the command to the parser."""
    found = commands.add_parser(
        "env",
        help="print versions, devices, plug-ins and settings, for a bug report",
        epilog="example: amphal env --json",
    )
    found.add_argument("--json", action="store_true", help="print JSON")
    found.set_defaults(run=run)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _backends() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for row in registry.registered_backends().values():
        backend = row.backend
        facts: dict[str, Any] = {"from": row.source, "error": row.error or None}
        if backend is not None:
            answer = registry.availability(backend)
            facts.update(contract=backend.contract, available=answer.ok, reason=answer.reason)
            if answer:
                hardware = backend.probe(None)
                facts.update(hardware=hardware.name, flags=sorted(hardware.flags))
        rows[row.name] = facts
    return rows


def document() -> dict[str, Any]:
    """Everything that the command prints, as plain data."""
    return {
        "amphal": __version__,
        "torch": torch.__version__,
        "cuda build": torch.version.cuda,
        "rocm build": getattr(torch.version, "hip", None),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "packages": {name: v for name in _BESIDE if (v := _version(name))},
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("AMPHAL_")},
        "backends": _backends(),
    }


def run(args: argparse.Namespace) -> int:
    """Always 0."""
    found = document()
    if args.json:
        output.print_json(found)
        return 0
    console = output.console()
    for name, value in found.items():
        if not isinstance(value, dict):
            console.print(f"{name}: {value}", markup=False)
            continue
        console.print(f"{name}:" + ("" if value else " none"), markup=False)
        for key, fact in value.items():
            if isinstance(fact, dict):
                fact = "; ".join(f"{k} {v}" for k, v in fact.items() if v not in (None, "", []))
            console.print(f"  {key}: {fact}", markup=False)
    return 0
