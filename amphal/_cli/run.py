"""``amphal run [--trace OUT.html] SCRIPT ARGS``: a script under the trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .._trace import run_script, script_file, trace
from ..errors import ArgumentError

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add the command to the parser."""
    found = commands.add_parser(
        "run",
        help="run a script, and record what ran in which precision",
        epilog="example: amphal run --trace out.html train.py --steps 10",
    )
    found.add_argument("--trace", metavar="OUT.html", help="write this page when the script ends")
    found.add_argument("--compare", metavar="DEVICE", help="mark what this device casts otherwise")
    found.add_argument("--values", action="store_true", help="record the ranges of values too")
    found.add_argument("script", help="a Python file")
    found.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    found.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The script's exit status. Its traceback is its own."""
    script = script_file(args.script)
    if args.trace and not Path(args.trace).resolve().parent.is_dir():
        raise ArgumentError(f"the folder of --trace {args.trace!r} does not exist")
    status = 0
    with trace(values=args.values, compare=args.compare) as traced:
        try:
            run_script(script, args.args)
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else int(left.code is not None)
            if isinstance(left.code, str):
                print(left.code, file=sys.stderr)
        finally:
            if args.trace:
                traced.to_html(args.trace)
    if not args.trace:
        print(traced.table(), end="")
    return status
