"""The version, for programs."""

__version__ = "0.1.0"
