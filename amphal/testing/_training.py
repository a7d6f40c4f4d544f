"""The training loop of the README, small, for the conformance suite."""

from __future__ import annotations

from typing import Any

import torch

from .. import _front
from .._scaler import GradScaler
from ..contract import registry

__all__ = ["Training"]


class _Product(torch.nn.Linear):
    """A linear layer by ``mm``: some devices cast ``mm`` and not ``linear``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The layer's output, in the dtype of the product."""
        product = torch.mm(input, self.weight.t())
        return product + self.bias.to(product.dtype)


class Training:
    """A small regression on the device: 8 inputs, 16 hidden units, 4 outputs, 16 examples."""

    def __init__(self, plan: _front.Plan, **scaler: Any) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), _Product(16, 4)
        self.model = torch.nn.Sequential(*layers).to(plan.device)
        self.seen: set[torch.dtype] = set()
        """The dtypes that the outputs of the layers had."""
        for layer in self.model:
            layer.register_forward_hook(lambda module, args, out: self.seen.add(out.dtype))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.5)
        self.scaler = GradScaler(plan, **scaler)
        self.plan = plan
        self.synchronize = registry.get_backend(plan.hardware.device_type).synchronize
        self.x = torch.randn(16, 8).to(plan.device)
        self.y = (torch.randn(16, 4) + 2).to(plan.device)

    def step(self, times: float = 1.0) -> float:
        """One step of the loop in the README; gives the loss. ``times`` multiplies its gradient."""
        self.optimizer.zero_grad()
        with self.plan.autocast():
            loss = torch.nn.functional.mse_loss(self.model(self.x).float(), self.y)
        torch.autograd.backward(self.scaler.scale(loss * times if times != 1.0 else loss))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.synchronize is not None:
            self.synchronize()  # a lazy device (XLA) would trace all steps as one program
        return float(loss.item())

    def weights(self) -> list[torch.Tensor]:
        """The parameters as they are now, copied to the CPU."""
        return [p.detach().cpu().clone() for p in self.model.parameters()]

    def state_on_cpu(self) -> dict[str, Any]:
        """What a checkpoint holds, its tensors on the CPU."""
        return {
            "model": _to_cpu(self.model.state_dict()),
            "optimizer": _to_cpu(self.optimizer.state_dict()),
            "scaler": _to_cpu(self.scaler.state_dict()),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take up a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {k: _to_cpu(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_cpu(v) for v in value)
    return value
