"""``amphal detect [--device D] [--precision P] [--json]``."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from typing import Any

from .._front import Plan, detect
from ..contract import registry
from ..errors import AmphalError, PrecisionWarning
from . import output

__all__ = ["add", "run"]


def _rows() -> list[dict[str, Any]]:
    """A row a backend: is it usable here, why not, and the plan that it would get."""
    out: list[dict[str, Any]] = []
    for row in registry.registered_backends().values():
        backend = row.backend
        found: dict[str, Any] = {
            "name": row.name,
            "source": row.source,
            "priority": None if backend is None else backend.priority,
            "available": False,
            "reason": row.error,
            "plan": None,
        }
        if backend is not None:
            answer = registry.availability(backend)
            found["available"], found["reason"] = answer.ok, answer.reason
            if answer:
                try:
                    found["plan"] = detect(backend.device_type, precision="auto").to_dict()
                except AmphalError as exc:
                    found["reason"] = str(exc)
        out.append(found)
    return sorted(out, key=lambda r: (r["priority"] is None, -(r["priority"] or 0), r["name"]))


def _chosen(device: str | None, precision: str) -> tuple[Plan | None, str, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrecisionWarning)
        try:
            return detect(device, precision=precision), "", [str(w.message) for w in caught]
        except AmphalError as exc:
            return None, str(exc), []


def _print_json(plan: Plan | None, error: str, notes: list[str]) -> None:
    document = {
        "backends": _rows(),
        "plan": None if plan is None else plan.to_dict(),
        "error": error or None,
        "warnings": notes,
    }
    print(json.dumps(document, indent=2))


def _print_table(plan: Plan | None, error: str, notes: list[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    table = output.table("backend", "here", "hardware", "precision", "scaler", "from")
    reasons = []
    for row in _rows():
        found = row["plan"]
        cells = (
            ("", "", "")
            if found is None
            else (found["hardware"]["name"], found["dtype"], "on" if found["use_scaler"] else "off")
        )
        # Text, because what a driver or a plug-in says is no markup.
        here = "yes" if row["available"] else "no"
        table.add_row(*(Text(c) for c in (row["name"], here, *cells, row["source"])))
        if row["reason"] and row["reason"] != error:
            reasons.append(f"{row['name']}: {row['reason']}")
    console = output.console()
    console.print(table)
    for reason in reasons:
        console.print(Text(reason))
    if plan is not None:
        console.print(Text(plan.explain()))
    for note in notes:
        console.print(Text(f"Warning: {note}"))
    if error:
        sys.stdout.flush()
        Console(stderr=True).print(Text(f"Error: {error}"))


def add(commands: Any) -> None:
    """Add the command to the parser."""
    found = commands.add_parser(
        "detect",
        help="show every backend, and the plan for this machine with its reasons",
        epilog="example: amphal detect --precision fp16",
    )
    found.add_argument("--device", help="ask about this device (AMPHAL_DEVICE stands in for it)")
    found.add_argument(
        "--precision", default="auto", help="auto, bf16, fp16 or fp32 (or AMPHAL_PRECISION)"
    )
    found.add_argument("--json", action="store_true", help="print JSON")
    found.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0, or 1 where there is no plan."""
    plan, error, notes = _chosen(args.device, args.precision)
    (_print_json if args.json else _print_table)(plan, error, notes)
    return 0 if plan is not None else 1
