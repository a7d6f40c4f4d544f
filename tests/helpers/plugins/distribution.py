"""Distributions as pip would leave them, without pip: a module and a dist-info folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

GOOD = """
import torch
from amphal import Hardware, OpLists
from amphal.contract import Availability, Backend, DtypeSupport, ScalerSupport

def available(): return Availability({ok}, "" if {ok} else "no such hardware")
def probe(index): return Hardware("{name}", "the {name} device", index)
def dtypes(hw): return {{d: DtypeSupport("native", True, "by its data sheet")
                        for d in (torch.bfloat16, torch.float16)}}
def op_lists(dtype): return OpLists(lower_precision={{"mm"}})
def scaler(hw): return ScalerSupport(False, False, True, False)
def backend(**changes):
    fields = dict(device_type="{name}", priority=-5, available=available, probe=probe,
                  dtypes=dtypes, op_lists=op_lists, scaler=scaler)
    return Backend(**{{**fields, **changes}})
"""


def backend_source(name: str, last: str = "BACKEND = backend()", *, ok: bool = True) -> str:
    """The source of a module with a sound backend, up to its last lines."""
    return GOOD.format(name=name, ok=ok) + last + "\n"


def distribution(
    folder: Path, name: str, source: str, entry_points: str | Mapping[str, str]
) -> None:
    """A module of this source in ``folder``, and the metadata that makes it a distribution."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    if not isinstance(entry_points, str):
        lines = [f"{key} = {value}" for key, value in entry_points.items()]
        entry_points = "\n".join(["[amphal.backends]", *lines])
    (info / "entry_points.txt").write_text(entry_points + "\n")


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a fresh process that finds the distributions in ``folder``."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
