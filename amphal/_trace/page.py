"""The page that a trace writes: one file, no network, light and dark."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

__all__ = ["page"]


def page(data: dict[str, Any]) -> str:
    """The page for the plain data of a trace; its form is ``data/trace.html``."""
    form = (resources.files("amphal.data") / "trace.html").read_text(encoding="utf-8")
    # "</" would end the script element inside a string.
    return form.replace("__DATA__", json.dumps(data).replace("</", "<\\/"))
