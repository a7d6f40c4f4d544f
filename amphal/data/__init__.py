"""Data files of amphal: known hardware (``hardware.toml``), facts only, each with its source."""
