"""Run a script as ``python script arguments`` does, in this process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ArgumentError

__all__ = ["run_script", "script_file"]


def script_file(name: str) -> Path:
    """The file of a script.

    Raises:
        ArgumentError: there is no such file.
    """
    path = Path(name)
    if not path.is_file():
        raise ArgumentError(f"there is no file {name!r} to run")
    return path


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run it as ``__main__``; ``sys.argv`` and ``sys.path`` are put back, whatever it raises."""
    argv, path = sys.argv, sys.path[:]
    sys.argv, sys.path[0:1] = [str(script), *arguments], [str(script.resolve().parent)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
