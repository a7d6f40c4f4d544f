"""What ``tune()`` found, kept in the user's cache folder; a cache that fails costs a warning.

The folder is found by own code: three paths, where a library for them would be a dependency of
everybody who installs amphal.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._warnings import warn
from ..errors import AmphalWarning, ArgumentError, ArgumentTypeError
from .sentences import Measurement

__all__ = ["Cache", "folder"]

FOLDER = "AMPHAL_CACHE_DIR"
_FORMAT = 1
_TYPES: Mapping[str, tuple[type, ...]] = {
    "candidate": (str,),
    "seconds": (float, int, type(None)),
    "ratio": (float, int, type(None)),
    "spread": (float, int, type(None)),
    "rounds": (int,),
    "loss": (float, int, type(None)),
    "dropped": (bool,),
    "note": (str,),
}


def folder() -> Path:
    """``AMPHAL_CACHE_DIR``, or the folder "amphal" where this system keeps users' caches."""
    named = os.environ.get(FOLDER, "").strip()
    if named:
        return Path(named).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG rules: a relative path is invalid and ignored.
        base = base if os.path.isabs(base) else str(Path.home() / ".cache")
    return Path(base) / "amphal"


class Cache:
    """One entry: the user's name for the step, under everything else that the answer hangs on."""

    def __init__(self, name: object, key: Mapping[str, Any]) -> None:
        if not isinstance(name, str):
            raise ArgumentTypeError(
                f"cache must be a name for this step, or None for no cache, "
                f"got {type(name).__name__} ({name!r})"
            )
        if not name.strip():
            raise ArgumentError("cache must be a name for this step, got an empty string")
        # As it will be read back: tuples become lists.
        self._key = json.loads(json.dumps({"format": _FORMAT, "name": name, **key}))
        self._candidates = list(self._key.get("candidates", []))
        digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:16]
        self._warned = False
        readable = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:40]
        self._file = f"{readable}-{digest}.json"

    @property
    def path(self) -> Path:
        """Where the entry lies, or would."""
        return folder() / "tune" / self._file

    def read(self) -> tuple[str, tuple[Measurement, ...]] | None:
        """The name of the chosen candidate and the rows; None where there is no sound entry."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, UnicodeDecodeError) as exc:
            self._warn("cannot be read", exc)
            return None
        try:
            entry = json.loads(text)
            if entry["key"] != self._key:
                raise ValueError("its key is another one")
            rows = tuple(_row(row) for row in entry["measured"])
            able = [row.candidate for row in rows if not row.dropped and row.seconds is not None]
            if entry["chosen"] not in able or entry["chosen"] not in self._candidates:
                raise ValueError("its choice is none of its candidates")
            return entry["chosen"], rows
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            self._warn("is damaged, so this step is measured anew", exc)
            return None

    def write(self, chosen: str, rows: tuple[Measurement, ...]) -> None:
        """Replace the entry in one go: a reader sees the old one or the new one."""
        entry = {"key": self._key, "chosen": chosen, "measured": [row.to_dict() for row in rows]}
        temporary = None
        try:
            path = self.path
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(entry, file, indent=2)
            os.replace(temporary, path)
        except (OSError, RuntimeError) as exc:
            self._warn("cannot be written", exc)
            if temporary is not None and os.path.exists(temporary):
                os.unlink(temporary)

    def _warn(self, what: str, exc: Exception) -> None:
        if self._warned:
            return
        self._warned = True
        warn(
            f"amphal.tune(): the cache entry {self._file} in {FOLDER} or the user's cache folder "
            f"{what} ({type(exc).__name__}: {exc}). {FOLDER} names another folder; cache=None "
            "uses none",
            AmphalWarning,
        )


def _row(row: Mapping[str, Any]) -> Measurement:
    if set(row) != set(_TYPES):
        raise ValueError(f"a row has the fields {sorted(row)}")
    for name, kinds in _TYPES.items():
        if not isinstance(row[name], kinds):
            raise ValueError(f"{name} is {row[name]!r}")
    if row["seconds"] is not None and not 0 < row["seconds"] < math.inf:
        raise ValueError(f"seconds is {row['seconds']!r}")
    return Measurement(**row)
