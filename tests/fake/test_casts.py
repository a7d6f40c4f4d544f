"""cuda, xpu and mps without their hardware: fake tensors are cast as torch casts them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

import amphal
from amphal.testing import simulate

pytestmark = pytest.mark.fake

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HARDWARE = {
    "cuda": amphal.Hardware("cuda", "NVIDIA H100", vendor="nvidia", capability=(9, 0)),
    "xpu": amphal.Hardware(
        "xpu",
        "Intel Data Center GPU Max 1550",
        flags=frozenset({"has_fp16", "has_fp64", "has_bfloat16_conversions"}),
    ),
    "mps": amphal.Hardware("mps", "Apple M3", architecture="M3", os="darwin", os_version=(15, 0)),
}
Op = Callable[[torch.Tensor], torch.Tensor]
# op, dtype of the result in a region of low precision on every GPU; None: the region's.
OPS: dict[str, tuple[Op, torch.dtype | None]] = {
    "matmul": (lambda x: x @ x, None),
    "linear": (lambda x: F.linear(x, x), None),
    "bmm": (lambda x: torch.bmm(x.unsqueeze(0), x.unsqueeze(0)), None),
    "conv1d": (lambda x: F.conv1d(x.unsqueeze(0), x.unsqueeze(2)), None),
    "softmax": (lambda x: F.softmax(x, -1), FP32),
    "log_softmax": (lambda x: F.log_softmax(x, -1), FP32),
    "layer_norm": (lambda x: F.layer_norm(x, (8,)), FP32),
    "exp": (torch.exp, FP32),
    "pow": (lambda x: x**2.5, FP32),
    "sum": (torch.sum, FP32),
    "mse_loss": (lambda x: F.mse_loss(x, x), FP32),
    "cumsum": (lambda x: x.cumsum(0), FP32),
}


@pytest.mark.parametrize("device", sorted(HARDWARE))
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", sorted(OPS))
def test_ops_are_cast_by_the_devices_policy(device: str, dtype: torch.dtype, name: str) -> None:
    """softmax is fp32 on a GPU, matmul the region's dtype: by torch's kernels for the device."""
    op, want = OPS[name]
    with simulate(HARDWARE[device]), FakeTensorMode(), torch.no_grad():
        low = torch.empty(8, 8, device=device, dtype=dtype)
        full = torch.empty(8, 8, device=device)
        with amphal.autocast(device, dtype):
            assert op(low).dtype is (want or dtype)
            assert op(full).dtype is (want or dtype)
        assert op(full).dtype is FP32
    assert not torch.is_autocast_enabled(device)


@pytest.mark.parametrize("device", sorted(HARDWARE))
def test_the_same_casts_as_torchs_own_state(device: str) -> None:
    """Side by side with the state that torch.autocast sets where the device exists."""
    for dtype in (BF16, FP16):
        with simulate(HARDWARE[device]), FakeTensorMode(), torch.no_grad():
            x = torch.empty(8, 8, device=device)
            with amphal.autocast(device, dtype):
                ours = {name: op(x).dtype for name, (op, _) in OPS.items()}
            before = torch.get_autocast_dtype(device)
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, dtype)
            try:
                theirs = {name: op(x).dtype for name, (op, _) in OPS.items()}
            finally:
                torch.set_autocast_enabled(device, False)
                torch.set_autocast_dtype(device, before)
                torch.clear_autocast_cache()
        assert ours == theirs


@pytest.mark.parametrize("device", sorted(HARDWARE))
@pytest.mark.parametrize("spelling", ["{}", "{}:0", "torch"])
def test_every_spelling_enables_this_device_and_no_other(device: str, spelling: str) -> None:
    """ "cuda:0" turned something half on in torch; here the index goes before any check."""
    named = torch.device(device, 0) if spelling == "torch" else spelling.format(device)
    with simulate(HARDWARE[device]):
        with amphal.autocast(named, FP16):
            on = [d for d in ("cpu", "cuda", "xpu", "mps") if torch.is_autocast_enabled(d)]
            assert on == [device]


@pytest.mark.parametrize("device", sorted(HARDWARE))
def test_float64_and_integers_are_left_alone(device: str) -> None:
    """Autocast touches floating-point tensors that are not float64."""
    kinds = [torch.int64] if device == "mps" else [torch.float64, torch.int64]
    with simulate(HARDWARE[device]), FakeTensorMode(), torch.no_grad():
        with amphal.autocast(device, FP16):
            for kind in kinds:
                x = torch.empty(8, 8, device=device, dtype=kind)
                assert (x + x).dtype is kind


@pytest.mark.parametrize("device", sorted(HARDWARE))
def test_a_nested_full_precision_region(device: str) -> None:
    """float32 means full precision on every device alike, in silence."""
    with simulate(HARDWARE[device]), FakeTensorMode(), torch.no_grad():
        x = torch.empty(8, 8, device=device)
        with amphal.autocast(device, FP16):
            with amphal.autocast(device, "fp32"):
                assert (x @ x).dtype is FP32
            assert (x @ x).dtype is FP16


@pytest.mark.parametrize("device", sorted(HARDWARE))
def test_two_devices_at_once(device: str) -> None:
    """A region on one device leaves the CPU's tensors alone."""
    with simulate(HARDWARE[device]), FakeTensorMode(), torch.no_grad():
        x, y = torch.empty(8, 8, device=device), torch.empty(8, 8)
        with amphal.autocast(device, FP16):
            assert (x @ x).dtype is FP16
            assert (y @ y).dtype is FP32
