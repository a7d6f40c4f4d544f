"""One finding, and the texts of all kinds of findings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["KINDS", "Finding"]

KINDS: dict[str, tuple[str, str, str]] = {
    "fp16-without-scaler": (
        "error",
        "a loss was computed in an fp16 region, and its backward pass ran without a gradient "
        "scaler: small gradients become zero",
        "use scaler = amphal.GradScaler(), and scaler.scale(loss).backward()",
    ),
    "clip-before-unscale": (
        "error",
        "gradients were clipped while they were still multiplied by the loss scale: the bound "
        "means something else at each scale",
        "call scaler.unscale_(optimizer) first, or scaler.clip_grad_norm_(optimizer, max_norm)",
    ),
    "missing-update": (
        "error",
        "the scaler stepped and was never updated afterwards: the scale does not adapt, and the "
        "next step raises",
        "call scaler.update() once at the end of each iteration",
    ),
    "step-past-the-scaler": (
        "error",
        "an optimizer stepped by itself with gradients that were multiplied by the loss scale",
        "call scaler.step(optimizer) instead of optimizer.step()",
    ),
    "backward-under-autocast": (
        "warning",
        "backward() was called inside an autocast region: ops of the backward pass that autocast "
        "lists are cast again, which torch advises against",
        "end the region after the loss is computed, and call backward() outside of it",
    ),
    "fp16-parameters": (
        "error",
        "a scaler was used with an optimizer that holds fp16 parameters: unfused it raises, fused "
        "it updates weights in fp16",
        "keep the parameters in fp32 (no model.half()) and let autocast cast them",
    ),
    "region-of-another-device": (
        "error",
        "a region was entered for a device on which no op ran while it was entered: nothing was "
        "cast, and the step ran in full precision",
        "use amphal.autocast(), which takes the detected device, or the device of the tensors",
    ),
    "region-casts-nothing": (
        "warning",
        "a region was entered and cast nothing: every op in it ran in the precision of its inputs",
        "put the region around the forward pass, or leave it out",
    ),
    "banned-elsewhere": (
        "error",
        "an op ran in a region that other devices refuse there",
        "binary_cross_entropy: use binary_cross_entropy_with_logits on the logits, or compute it "
        "in float32 in a region with enabled=False",
    ),
    "weights-cast-again": (
        "note",
        "the same weights were cast in many regions although they did not change in between",
        "with amphal.hold_casts(model): around the loop keeps the casts until a weight changes; "
        "amphal.precast_(model) stores frozen weights in low precision",
    ),
    "schedule-on-skipped-step": (
        "warning",
        "the learning-rate schedule advanced although the scaler had skipped the optimizer's step",
        "call scaler.scheduler_step(scheduler), which advances only with the optimizer",
    ),
    "device-in-the-code": (
        "warning",
        "the script names a device, so it runs on no other",
        "use plan = amphal.detect() and plan.device",
    ),
}


@dataclass(frozen=True)
class Finding:
    """A mistake: where it is, why it is one, and what to write instead."""

    kind: str
    line: str
    """``file:line`` in the script or in what it imports; empty if it has no place."""
    detail: str = ""
    count: int = 1

    @property
    def level(self) -> str:
        """``"error"``: wrong numbers; ``"warning"``: likely wrong; ``"note"``: only slow."""
        return KINDS[self.kind][0]

    @property
    def cause(self) -> str:
        """What happened."""
        cause = KINDS[self.kind][1]
        return f"{cause} ({self.detail})" if self.detail else cause

    @property
    def cure(self) -> str:
        """What to write instead."""
        return KINDS[self.kind][2]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "level": self.level, "cause": self.cause, "cure": self.cure}
