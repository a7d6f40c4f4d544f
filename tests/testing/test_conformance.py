"""The built-in backends go through the conformance suite like any plug-in."""

from __future__ import annotations

from amphal.testing import BackendConformance


class TestCpu(BackendConformance):
    backend = "cpu"


class TestCuda(BackendConformance):
    backend = "cuda"


class TestXpu(BackendConformance):
    backend = "xpu"


class TestMps(BackendConformance):
    backend = "mps"
