"""Devices with gaps, and lists that leave things out; run by test_conformance_faults.py."""

from __future__ import annotations

from amphal import OpLists
from amphal.testing import BackendConformance, FakeBackend, _device, install_device

install_device("toy")
# torch's own refusal is a NotImplementedError too.
_device._NO_KERNELS = (*_device._NO_KERNELS, "gelu", "tanh")  # type: ignore[assignment]


class TestTwoOpsAreMissing(BackendConformance):
    """A sound backend; the device lacks two common ops."""

    backend = FakeBackend("toy")


class TestLayersStayFloat32(BackendConformance):
    """Neither linear nor mm is cast, so a region computes in float32; an overflow stays one."""

    backend = FakeBackend(
        "toy", op_lists=OpLists(lower_precision=frozenset({"bmm"}), fp32=frozenset({"exp"}))
    )
