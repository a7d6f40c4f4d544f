"""A backend whose answers are values, for tests of code that uses amphal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ..contract import Availability, Backend, DtypeSupport, Hardware, OpLists, ScalerSupport

__all__ = ["FakeBackend"]

_T = TypeVar("_T")

_DTYPES = {
    torch.bfloat16: DtypeSupport("native", True, "the fake device says so"),
    torch.float16: DtypeSupport("native", True, "the fake device says so"),
}
_LISTS = OpLists(
    lower_precision=frozenset(
        ["addmm", "baddbmm", "bmm", "conv2d", "linear", "matmul", "mm", "mv"]
    ),
    fp32=frozenset(["exp", "layer_norm", "log", "mse_loss", "pow.Tensor_Scalar"]),
    fp32_set_opt_dtype=frozenset(["log_softmax.int", "softmax.int", "sum", "sum.dim_IntList"]),
    promote=frozenset(["addcdiv", "addcmul", "dot"]),
    banned=frozenset(["binary_cross_entropy"]),
)
_SCALER = ScalerSupport(
    native_kernels=False, fp64=True, detects_overflow=True, fused_optimizers=False
)


def _always(answer: Any) -> Callable[..., Any]:
    return answer if callable(answer) else lambda *_: answer


class FakeBackend(Backend):
    """A :class:`amphal.contract.Backend` that takes values where a real one takes functions.

    ::

        register_backend(FakeBackend("toy", dtypes={torch.float16: DtypeSupport(...)}))

    Without arguments it describes the device of :func:`install_device`, and is available where
    that is installed. Its priority is below the CPU's, so it is used where it is named.

    Args:
        device_type: the torch device type it claims.
        priority: as in :class:`amphal.contract.Backend`.
        available: True, or the reason why it is absent, or an ``Availability``.
        probe: the :class:`amphal.Hardware` that is found, whatever the index.
        dtypes, op_lists, scaler: the answers for every hardware and dtype.
        fields: any other field of :class:`amphal.contract.Backend`.

    A function is taken as it is, in each place.
    """

    def __init__(
        self,
        device_type: str = "toy",
        priority: int = -1,
        available: bool | str | Availability | Callable[[], Availability] | None = None,
        probe: Hardware | Callable[[int | None], Hardware] | None = None,
        dtypes: Mapping[torch.dtype, DtypeSupport] | Callable[..., Any] = _DTYPES,
        op_lists: OpLists | Callable[..., Any] = _LISTS,
        scaler: ScalerSupport | Callable[..., Any] = _SCALER,
        **fields: Any,
    ) -> None:
        if available is None:
            available = lambda: _installed(device_type)  # noqa: E731
        elif available is True:
            available = Availability(True)
        elif isinstance(available, str):
            available = Availability(False, available)
        if probe is None:
            probe = lambda index: _toy(device_type, index)  # noqa: E731
        super().__init__(
            device_type,
            priority,
            _always(available),
            _always(probe),
            _always(dtypes),
            _always(op_lists),
            _always(scaler),
            **fields,
        )


def _installed(device_type: str) -> Availability:
    from ._device import installed_device, why_not_installable

    if installed_device() == device_type:
        return Availability(True)
    reason = why_not_installable()
    return Availability(
        False, reason or f"amphal.testing.install_device({device_type!r}) was not called"
    )


def _toy(device_type: str, index: int | None) -> Hardware:
    if index:
        raise IndexError(f"there is one {device_type} device, and its index is 0, not {index}")
    return Hardware(device_type, "a pretended device", index, vendor="amphal.testing")
