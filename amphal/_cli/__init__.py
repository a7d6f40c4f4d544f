"""The command line: one file a command, each with ``add(parser)`` and ``run(arguments)``."""

from .main import main

__all__ = ["main"]
