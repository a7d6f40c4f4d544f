"""The public API as a type checker sees it: checked by mypy --strict, never run."""

from __future__ import annotations

from typing import Any

import torch

import amphal

plan: amphal.Plan = amphal.detect("cuda:0", precision=torch.bfloat16)
amphal.detect(torch.device("cpu"), precision="fp16")
amphal.detect(amphal.Hardware("cuda", "Tesla T4", capability=(7, 5)))
amphal.detect.cache_clear()

text: str = plan.explain()
data: dict[str, Any] = plan.to_dict()
region: torch.autocast = plan.autocast(enabled=False)
scaler: amphal.GradScaler = plan.grad_scaler(init_scale=2.0**10)
torchs: torch.amp.GradScaler = scaler


def step(plan: amphal.Plan, scaler: amphal.GradScaler) -> torch.Tensor:
    return torch.ones(())


tuned: amphal.Plan = amphal.tune(
    step, candidates=["fp32", torch.bfloat16, plan], state=[], chart="text"
)
rows: tuple[amphal.Measurement, ...] | None = tuned.measured
with tuned.matmul():
    pass

with amphal.autocast():
    pass
with amphal.autocast("cuda", torch.float16, True, None):
    pass
with amphal.autocast(plan, cache_enabled=False):
    pass


@amphal.autocast
def bare(x: torch.Tensor) -> torch.Tensor:
    return x


@amphal.autocast("cpu", dtype="bf16")
def called(x: torch.Tensor) -> torch.Tensor:
    return x


y: torch.Tensor = bare(torch.ones(1)) + called(torch.ones(1))


class Square(torch.autograd.Function):
    @staticmethod
    @amphal.custom_fwd(cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    @amphal.custom_bwd
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


model = torch.nn.Linear(2, 2)
report: amphal.PrecastReport = amphal.precast_(model, example_inputs=torch.ones(1, 2), plan=plan)
saved: int = report.bytes_saved
restored: tuple[str, ...] = amphal.undo_precast_(model, rounded=True)
with amphal.hold_casts(model, model):
    y = model(y)
full: dict[str, Any] = amphal.full_precision_state_dict(model)
