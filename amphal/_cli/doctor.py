"""``amphal doctor SCRIPT ARGS``: run a script, and say what a reviewer would."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import traceback
from typing import Any

from .._doctor import examine
from .._trace import script_file
from . import output

__all__ = ["add", "run"]


def add(commands: Any) -> None:
    """Add the command to the parser."""
    found = commands.add_parser(
        "doctor",
        help="run a script, and report mistakes in its mixed precision",
        epilog="example: amphal doctor train.py --steps 10",
    )
    found.add_argument("--json", action="store_true", help="print JSON")
    found.add_argument(
        "--compare", metavar="DEVICE", help="report the ops that this device bans in a region"
    )
    found.add_argument("script", help="a Python file")
    found.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    found.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 if nothing is wrong (notes are not), 1 if something is or the script failed."""
    script = script_file(args.script)
    # With --json the script's own output goes to standard error, so that programs can read ours.
    aside: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if args.json:
        aside = contextlib.redirect_stdout(sys.stderr)
    with aside:
        findings, ended = examine(script, args.args, compare=args.compare)
    failed = ended is not None
    if args.json:
        document = {"findings": [f.to_dict() for f in findings], "ended": repr(ended or None)}
        output.print_json(document)
    else:
        _print(findings, ended)
    return int(failed or any(f.level != "note" for f in findings))


def _print(findings: list[Any], ended: BaseException | None) -> None:
    console = output.console()
    for f in findings:
        times = f" ({f.count} times)" if f.count > 1 else ""
        console.print(f"{f.level}: {f.kind}  {f.line}{times}", markup=False)
        console.print(f"  cause: {f.cause}", markup=False)
        console.print(f"  cure:  {f.cure}", markup=False)
    if ended is not None:
        text = io.StringIO()
        traceback.print_exception(ended, file=text)
        console.print(f"the script ended early:\n{text.getvalue()}", markup=False)
    console.print(f"{len(findings)} findings" if findings else "nothing found")
