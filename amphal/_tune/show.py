"""What ``tune()`` shows: a progress bar, bars of text, a PNG."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._warnings import warn
from ..errors import AmphalWarning, ArgumentError, ArgumentTypeError, MissingExtraError
from .sentences import Measurement, duration

__all__ = ["drawer", "progress_bar"]

_WIDTH = 24
_Draw = Callable[[Sequence[Measurement], str, str], None]


@contextmanager
def progress_bar(wanted: bool) -> Iterator[Callable[[float, str], None]]:
    """A bar on stderr where that is a terminal; what it gives takes a share and a text."""
    if not (wanted and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda share, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (
        TextColumn("amphal.tune"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share, text: bar.update(task, completed=share, description=text)


def drawer(chart: object) -> _Draw:
    """What draws rows, the chosen one's name and a title. Checked before anything is measured.

    Raises:
        ArgumentError, ArgumentTypeError: neither None, "text" nor the path of a PNG.
        MissingExtraError: a PNG without matplotlib.
    """
    if chart is None:
        return lambda rows, chosen, title: None
    if chart == "text":
        return _forgiving(_print_bars, "chart='text' cannot be printed")
    if not isinstance(chart, (str, os.PathLike)):
        raise ArgumentTypeError(
            "chart must be 'text', the path of a .png file or None, "
            f"got {type(chart).__name__} ({chart!r})"
        )
    path = Path(os.fsdecode(chart))
    if path.suffix.lower() != ".png":
        raise ArgumentError(
            f"chart must be 'text', the path of a .png file or None, got {str(chart)!r}"
        )
    if not path.parent.is_dir():
        raise ArgumentError(
            f"chart: there is no folder {str(path.parent)!r} to save {path.name} in"
        )
    if path.is_dir():
        raise ArgumentError(f"chart: {str(path)!r} is a folder; name a .png file")
    figure = _figure_class()
    return _forgiving(
        lambda rows, chosen, title: _save_png(figure, path, rows, chosen, title),
        f"chart={str(chart)!r} cannot be saved",
    )


def _forgiving(draw: _Draw, what: str) -> _Draw:
    """A chart that fails costs a warning: what was measured is worth more."""

    def drawn(rows: Sequence[Measurement], chosen: str, title: str) -> None:
        try:
            draw(rows, chosen, title)
        except Exception as exc:
            warn(f"amphal.tune(): {what} ({type(exc).__name__}: {exc})", AmphalWarning)

    return drawn


def _timed(rows: Sequence[Measurement]) -> list[tuple[Measurement, float, float]]:
    """The rows with a time; bars are ratios, because who stopped early saw other rounds."""
    return [
        (row, row.seconds, row.ratio)
        for row in rows
        if row.seconds is not None and row.ratio is not None
    ]


def _print_bars(rows: Sequence[Measurement], chosen: str, title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), box=None)
    table.add_column("candidate")
    table.add_column("", no_wrap=True, min_width=_WIDTH)
    for column in ("a step", "x", "rounds"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    console = Console()
    block = "█" if _can_print("█", console.encoding) else "#"
    longest = max((ratio for _, _, ratio in _timed(rows)), default=1.0)
    for row in rows:
        stopped = "stopped early" if row.note else ""
        note = "chosen" if row.candidate == chosen else "dropped" if row.dropped else stopped
        cells = ["", "", "", ""]
        for _, seconds, ratio in _timed([row]):
            bar = block * max(1, round(ratio / longest * _WIDTH))
            cells = [bar, duration(seconds), f"{ratio:.2f}", str(row.rounds)]
        style = "bold" if row.candidate == chosen else ""
        table.add_row(*(Text(cell, style) for cell in (row.candidate, *cells, note)))
    console.print(table)
    for row in rows:
        if row.dropped:  # a reason is too long for a column
            console.print(Text(f"dropped {row.candidate}: {row.note}"))


def _can_print(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _figure_class() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as exc:
        raise MissingExtraError(
            f"chart: a .png needs matplotlib, which cannot be imported ({exc}); "
            "install it with: pip install 'amphal[charts]', or pass chart='text'"
        ) from exc


def _save_png(
    figure_class: Any, path: Path, rows: Sequence[Measurement], chosen: str, title: str
) -> None:
    timed = _timed(rows)
    # Without pyplot, which would keep the figure and choose a window system.
    figure = figure_class(figsize=(7, 1.2 + 0.45 * len(timed)), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:green" if row.candidate == chosen else "tab:gray" for row, _, _ in timed]
    bars = axes.barh(
        [row.candidate for row, _, _ in timed], [ratio for _, _, ratio in timed], color=colors
    )
    labels = [f"{ratio:.2f} x, {duration(seconds)}" for _, seconds, ratio in timed]
    axes.bar_label(bars, labels, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    dropped = ", ".join(row.candidate for row in rows if row.dropped)
    label = "time of a step, as a multiple of the fastest"
    axes.set_xlabel(f"{label}; dropped: {dropped}" if dropped else label)
    axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=150)
