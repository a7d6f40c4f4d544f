"""Every benchmark, one after another, each in a fresh interpreter.

    python benchmarks/run.py [--only NAME ...] [--write]

Prints each table as it comes. ``--write`` puts the figures into ``results.json`` and the tables
into ``README.md`` beside this file. Needs the extra ``amphal[bench]``, a quiet machine, and about
half an hour on two cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import amphal

HERE = Path(__file__).parent
BENCHMARKS = ("overhead", "steps", "precast", "tune", "scaler", "policies", "growth")
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


def write(facts: dict[str, Any], tables: dict[str, str], figures: dict[str, Any]) -> None:
    """Put what was run into results.json and README.md; what was not stays as it was."""
    path = HERE / "results.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, table in tables.items():
        results[name] = {"machine": facts, "table": table, "figures": figures[name]}
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    readme = HERE / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    blocks = [_block(name, results[name]) for name in BENCHMARKS if name in results]
    readme.write_text(before + BEGIN + "\n".join(blocks) + END + after, encoding="utf-8")


def _block(name: str, result: dict[str, Any]) -> str:
    on = result["machine"]
    taken = f"{on['date']}, {on['device']}, {on['threads']} threads, torch {on['torch']}"
    return f"\n### {name}.py\n\n{taken}\n\n```text\n{result['table'].rstrip()}\n```\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run every benchmark.")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    parser.add_argument("--write", action="store_true", help="write results.json and README.md")
    args = parser.parse_args()
    facts = machine()
    print(json.dumps(facts))
    tables: dict[str, str] = {}
    figures: dict[str, Any] = {}
    for name in args.only:
        tables[name], figures[name] = run(name)
        print(f"\n{name}.py\n\n{tables[name]}", flush=True)
        if args.write:
            write(facts, tables, figures)


if __name__ == "__main__":
    main()
