"""``amphal COMMAND``: the parser, and errors as one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .._version import __version__
from ..errors import AmphalError
from . import detect, doctor, env, hardware, ops, run

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="amphal",
        description="Mixed precision for every PyTorch device.",
        epilog="amphal COMMAND --help says more, with an example.",
    )
    parser.add_argument("--version", action="version", version=f"amphal {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in (detect, ops, hardware, env, run, doctor):
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0: done. 1: the answer is no, such as no plan for the device. 2: the call was wrong.
    """
    parser = _parser()
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return int(args.run(args))
    except AmphalError as error:
        sys.stdout.flush()
        print(f"amphal {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # "amphal ops cuda | head"
        sys.stderr.close()
        return 0
