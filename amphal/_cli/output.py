"""What a person reads: tables without lines, as wide as they are where no terminal wraps them."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["console", "print_json", "table"]

WIDE = 1000
"""Columns where the output goes into a pipe or a file: nothing is wrapped there."""


def console() -> Console:
    """Standard output. A terminal's width, or all the width it needs where there is none."""
    from rich.console import Console

    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=WIDE if wide else None, highlight=False)


def table(*columns: str, title: str | None = None) -> Table:
    """A table without lines, so that it is plain ASCII."""
    from rich.table import Table

    made = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        title=title,
        title_justify="left",
        title_style="bold",
    )
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def print_json(document: Any) -> None:
    """For programs."""
    print(json.dumps(document, indent=2))
