"""What a gradient scaler keeps about one optimizer until ``update``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from .._torch import private

__all__ = ["OptimizerState"]


@dataclass(eq=False)
class OptimizerState:
    """One entry of ``_per_optimizer_states``, which other libraries read in torch's form.

    ``state["stage"]`` and ``state["found_inf_per_device"]`` work as with torch's dict (Lightning
    reads the first). The other fields can be read the same way.
    """

    stage: Any = OptState.READY
    """torch's ``OptState``: READY, UNSCALED or STEPPED."""

    found_inf_per_device: dict[torch.device, Tensor] = field(default_factory=dict)
    """A float32 flag per device, 1.0 after an overflow. Empty: no gradient was checked."""

    optimizer: Any = None
    """The optimizer. The reference also keeps its id from being used again."""

    found: bool | None = None
    """Whether there was an overflow, where the host has asked the device."""

    skip: bool | None = None
    """Whether to skip the step; None: the host does not know."""

    nothing: bool = False
    """No parameter has a gradient, so there is nothing to step."""

    own: dict[torch.device, Tensor] | None = None
    """The flags of this optimizer alone, where several optimizers or ranks decide together."""

    divisor: Tensor | None = None
    """What a fused optimizer divides by after clipping: the scale over the coefficient."""

    recheck: tuple[float, float] | None = None
    """``max_norm`` and ``norm_type`` of a clip that needs the exact check after an overflow."""

    params: list[Tensor] | None = None
    """The optimizer's parameters when its gradients were unscaled or clipped."""

    watched: dict[int, tuple[Tensor, int] | None] | None = None
    """Its gradients and their versions, by parameter, when a loss was scaled after they had been
    unscaled or clipped: a backward pass since then is seen by the difference."""

    held: Tensor | None = None
    """The flag of a fused step: where it is set, the gradients still carry the scale."""

    calls: int = 0
    """How many losses were scaled before this optimizer was stepped."""

    noted: bool = True
    """Whether all gradients were noted when this optimizer was handled."""

    def __getitem__(self, key: str) -> Any:
        try:
            return getattr(self, key)
        except AttributeError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self, key, value)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and getattr(self, key, None) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The field, or ``default`` where it is not set; as ``dict.get``."""
        value = getattr(self, key, None)
        return default if value is None else value


private.not_as_frames(__name__)
