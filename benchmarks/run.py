"""Every benchmark, one after another, each in a fresh interpreter.

    python benchmarks/run.py [--only NAME ...] [--write] [--json PATH]

Prints each table as it comes. ``--write`` puts the tables into ``README.md`` beside this file,
``--json`` writes the figures and the machine to a file. Needs the extra ``amphal[bench]``, a quiet
machine, and about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import amphal

HERE = Path(__file__).parent
BENCHMARKS = ("overhead", "steps", "precast", "hold", "tune", "scaler", "policies", "growth")
BEGIN, END = "<!-- tables: written by run.py -->\n", "<!-- end of the tables -->\n"


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    plan = amphal.detect()
    return {
        "date": datetime.date.today().isoformat(),
        "device": plan.hardware.name or plan.device.type,
        "flags": sorted(plan.hardware.flags),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "amphal": amphal.__version__,
        "detect": str(plan.dtype).removeprefix("torch."),
    }


def run(name: str) -> tuple[str, Any]:
    """The table that a benchmark prints, and its figures."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(figures)]
        environment = {**os.environ, "COLUMNS": "110"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
        return done.stdout, json.loads(figures.read_text(encoding="utf-8"))


def renewed(page: str, facts: dict[str, Any], tables: dict[str, str]) -> str:
    """The page with the tables of this run; the others stay as they are."""
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    parts = re.split(r"^### (\w+)\.py\n", old, flags=re.MULTILINE)
    blocks = dict(zip(parts[1::2], parts[2::2], strict=True))
    taken = (
        f"{facts['date']}, {facts['device']}, {facts['threads']} threads, torch {facts['torch']}"
    )
    for name, table in tables.items():
        blocks[name] = f"\n{taken}\n\n```text\n{table.rstrip()}\n```\n"
    shown = [f"\n### {name}.py\n{blocks[name].rstrip()}\n" for name in BENCHMARKS if name in blocks]
    return before + BEGIN + "\n".join(shown) + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description="Run every benchmark.")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    parser.add_argument("--write", action="store_true", help="renew README.md")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures")
    args = parser.parse_args()
    facts = machine()
    print(json.dumps(facts))
    tables: dict[str, str] = {}
    figures: dict[str, Any] = {}
    for name in args.only:
        tables[name], figures[name] = run(name)
        print(f"\n{name}.py\n\n{tables[name]}", flush=True)
        if args.write:
            readme = HERE / "README.md"
            page = renewed(readme.read_text(encoding="utf-8"), facts, tables)
            readme.write_text(page, encoding="utf-8")
    if args.json:
        rows = {"machine": facts, "figures": figures}
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
