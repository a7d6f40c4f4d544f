"""``amphal ops DEVICE [--op NAME] [--diff OTHER] [--dtype D] [--json]``."""

from __future__ import annotations

import argparse
from typing import Any

from .._casting import op_lists
from ..errors import OpPolicyError, did_you_mean
from . import output

__all__ = ["add", "run"]

_NOT_LISTED = "not listed"


def add(commands: Any) -> None:
    """Add the command to the parser."""
    found = commands.add_parser(
        "ops",
        help="show which ops a device's autocast casts, and how",
        epilog="example: amphal ops cuda --diff cpu",
    )
    found.add_argument("device", help="a device type; the device need not be here")
    found.add_argument("--op", metavar="NAME", help="only this op and its overloads")
    found.add_argument("--diff", metavar="OTHER", help="only what this device casts otherwise")
    found.add_argument("--dtype", help="the region's dtype: bf16 or fp16")
    found.add_argument("--json", action="store_true", help="print JSON")
    found.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0; 2 for an unknown device or op."""
    here = dict(op_lists(args.device, args.dtype))
    there = dict(op_lists(args.diff, args.dtype)) if args.diff else {}
    names = sorted({*here, *there})
    if args.op:
        wanted = [n for n in names if n == args.op or n.startswith(f"{args.op}.")]
        if not wanted:
            raise OpPolicyError(
                f"{args.op!r} is on no list of {args.device}, so autocast passes it by."
                f"{did_you_mean(args.op, names)}"
            )
        names = wanted
    if args.diff:
        names = [n for n in names if here.get(n) != there.get(n)]
    rows = [(n, here.get(n, _NOT_LISTED), there.get(n, _NOT_LISTED)) for n in names]
    if args.json:
        keys = ["op", args.device, args.diff] if args.diff else ["op", args.device]
        output.print_json([dict(zip(keys, row, strict=False)) for row in rows])
        return 0
    table = output.table("op", args.device, *([args.diff] if args.diff else []))
    for row in rows:
        table.add_row(*row[: 3 if args.diff else 2])
    console = output.console()
    console.print(table)
    console.print(
        f"{len(rows)} ops" + (f" differ between {args.device} and {args.diff}" if args.diff else "")
    )
    return 0
