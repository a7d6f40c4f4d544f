"""Facts about the device in pure Python, run by test_plugins_device.py in a process of its own."""

from __future__ import annotations

import pytest
import torch

from amphal.errors import BackendError
from amphal.testing import BackendConformance, FakeBackend, install_device

install_device("toy")


def test_it_is_a_device_of_its_own() -> None:
    """Its tensors have its type, its dispatch keys and the strides of what they show."""
    x = torch.arange(6.0).reshape(2, 3).to("toy")
    assert x.device == torch.device("toy", 0)
    assert x.t().stride() == (1, 3)
    assert torch.equal(x.t()[1:].cpu(), torch.arange(6.0).reshape(2, 3).t()[1:])


def test_views_share_memory_and_copies_do_not() -> None:
    """Writing through a view shows in its base, and never in a clone."""
    base = torch.zeros(2, 3, device="toy")
    clone = base.clone()
    base.t()[1] = 5
    assert base.sum().item() == 10
    assert clone.sum().item() == 0


def test_a_cpu_tensor_beside_it_is_an_error() -> None:
    """Nothing falls back to the CPU unseen."""
    with pytest.raises(RuntimeError, match="toy"):
        torch.ones(2, device="toy") + torch.ones(2)


def test_it_has_no_amp_kernels() -> None:
    """A scaler that counts on torch's kernels fails, as on a young device."""
    x = torch.ones(1, device="toy")
    with pytest.raises(NotImplementedError, match="_amp_"):
        torch._amp_foreach_non_finite_check_and_unscale_([x], x, x)


def test_a_convolution_and_attention_train() -> None:
    """Gradients of composite and of overridable ops arrive, with the CPU's numbers."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(1, 2, 3)
    x = torch.randn(1, 1, 5, 5)
    conv(x).square().sum().backward()
    want = conv.weight.grad
    moved = torch.nn.Conv2d(1, 2, 3).to("toy")
    moved.load_state_dict(conv.state_dict())
    moved(x.to("toy")).square().sum().backward()
    assert want is not None
    assert moved.weight.grad is not None
    torch.testing.assert_close(moved.weight.grad.cpu(), want)
    attention = torch.nn.MultiheadAttention(8, 2).to("toy")
    y = torch.randn(2, 3, 8, device="toy")
    attention(y, y, y)[0].sum().backward()
    assert attention.in_proj_weight.grad is not None


def test_a_second_name_is_refused() -> None:
    """torch has one slot, and the error says who has it."""
    install_device("toy")
    with pytest.raises(BackendError, match="'toy' has it"):
        install_device("another")


class TestToy(BackendConformance):
    backend = FakeBackend("toy")
