"""``amphal hardware [NAME] [--matrix] [--json]``."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

from .._front import Plan, detect
from ..contract import KnownHardware, known_hardware, short_name
from ..errors import ArgumentError, did_you_mean
from . import output

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add the command to the parser."""
    found = commands.add_parser(
        "hardware",
        help="show what amphal knows of a device that is not here, and what it would choose there",
        epilog="example: amphal hardware t4",
    )
    found.add_argument("name", nargs="?", help="a name of the list; all devices without one")
    found.add_argument("--matrix", action="store_true", help="bf16 and fp16 of each device")
    found.add_argument("--json", action="store_true", help="print JSON")
    found.set_defaults(run=run)


def _plan(known: KnownHardware) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return detect(known.hardware)


def _support(plan: Plan, name: str) -> str:
    for dtype, support in plan.support.items():
        if short_name(dtype) == name:
            return support.level + (", fast" if support.accelerated else "")
    return "absent"


def run(args: argparse.Namespace) -> int:
    """0; 2 for a name that is not on the list."""
    table = known_hardware()
    if args.name is None:
        plans = {name: _plan(known) for name, known in table.items()}
        if args.json:
            output.print_json({name: plan.to_dict() for name, plan in plans.items()})
            return 0
        columns = ("bf16", "fp16") if args.matrix else ("chosen", "scaler")
        shown = output.table("name", "backend", "device", *columns)
        for name, plan in plans.items():
            cells = (
                (_support(plan, "bf16"), _support(plan, "fp16"))
                if args.matrix
                else (short_name(plan.dtype), "on" if plan.use_scaler else "off")
            )
            shown.add_row(name, plan.hardware.device_type, plan.hardware.name, *cells)
        output.console().print(shown)
        return 0
    if args.name not in table:
        raise ArgumentError(
            f"no device is called {args.name!r}; amphal hardware lists all {len(table)}."
            f"{did_you_mean(args.name, table)}"
        )
    plan = _plan(table[args.name])
    if args.json:
        output.print_json({**plan.to_dict(), "source": table[args.name].source})
        return 0
    console = output.console()
    console.print(plan.explain(), markup=False)
    console.print(f"Source of the facts: {table[args.name].source}", markup=False)
    return 0
