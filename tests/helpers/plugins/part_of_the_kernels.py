"""An extension that registers part of its declared casts; run in a process of its own."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import amphal
from amphal import OpLists
from amphal.contract import register_backend
from amphal.errors import BackendError
from amphal.testing import BackendConformance, FakeBackend, install_device

LOW = torch.bfloat16
extension = ModuleType("extension")
extension.is_available = lambda: True  # type: ignore[attr-defined]
extension.device_count = lambda: 1  # type: ignore[attr-defined]
extension.current_device = lambda: 0  # type: ignore[attr-defined]
extension._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
extension.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
extension.get_amp_supported_dtype = lambda: [LOW]  # type: ignore[attr-defined]
install_device("toy", extension)

# What a C++ extension registers: the fallthrough, and a cast of mm that counts its calls.
fallthrough = torch.library.Library("_", "IMPL")
fallthrough.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
calls: list[str] = []


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    calls.append("mm")
    with torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
    ):
        return torch.mm(a.to(LOW), b.to(LOW))


own = torch.library.Library("aten", "IMPL")
own.impl("mm", mm, "AutocastPrivateUse1")

LISTS = OpLists(
    lower_precision=frozenset({"mm", "bmm"}),
    fp32=frozenset({"exp"}),
    banned=frozenset({"binary_cross_entropy"}),
)
BACKEND = FakeBackend("toy", op_lists=LISTS)
register_backend(BACKEND)


def test_a_dtype_that_the_extension_lacks_is_refused() -> None:
    """fp16 is declared; torch.toy says bf16 alone, and a compiled region would run float32."""
    with pytest.raises(BackendError, match="get_amp_supported_dtype"):
        amphal.autocast("toy", dtype="fp16")
    assert not torch.is_autocast_enabled("toy")


def test_declared_ops_without_a_kernel_are_cast() -> None:
    """bmm and exp follow the lists; the extension's own mm is what runs."""
    assert amphal.op_lists("toy", "bf16") == LISTS
    x = torch.ones(1, 4, 4, device="toy")
    with amphal.autocast("toy", dtype="bf16"):
        assert torch.bmm(x, x).dtype is LOW
        assert torch.exp(x.to(LOW)).dtype is torch.float32
        assert torch.relu(x.to(LOW)).dtype is LOW
        assert not calls
        assert torch.mm(x[0], x[0]).dtype is LOW
        assert calls == ["mm"]
        with pytest.raises(RuntimeError, match="binary_cross_entropy"):
            torch.nn.functional.binary_cross_entropy(x / 2, x / 2)
    assert torch.bmm(x, x).dtype is torch.float32
    assert amphal.op_lists("toy", "bf16") == LISTS


class TestTheSuiteNamesTheDtype(BackendConformance):
    """The check for it fails; the caller counts on that."""

    backend = BACKEND
