"""``amphal.GradMonitor``: watch the gradient norm, where a bf16 run has no scaler to notice."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from .._torch import private
from ..errors import ArgumentError, ArgumentTypeError, ScalerStateError, did_you_mean
from . import arguments as rules
from . import gradients
from .norms import total_norm
from .optimizers import drop_stale_casts, is_fused, needs_host
from .outcome import StepOutcome
from .scaler import GradScaler

__all__ = ["GradHealth", "GradMonitor"]

_SKIP = ("none", "nonfinite", "spike")
_MAD = 1.4826
"""A median absolute deviation times this estimates a standard deviation."""
_LEAST_SPREAD = 0.05
"""Norms that agree to within 5 % are not evidence that 10 % more is a spike."""


class GradHealth:
    """One observation. Every property but ``tensor`` waits for the device, once for all of them."""

    __slots__ = ("_values", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        """float32 of shape (4,): the norm, not finite, a spike (0 or 1 each), the usual norm."""
        self._values: list[float] | None = None

    def _read(self, index: int) -> float:
        if self._values is None:
            self._values = self.tensor.tolist()
        return self._values[index]

    @property
    def norm(self) -> float:
        """The 2-norm of the unscaled gradients."""
        return self._read(0)

    @property
    def finite(self) -> bool:
        """No gradient is inf or NaN."""
        return not self._read(1)

    @property
    def spike(self) -> bool:
        """The norm is far above the usual ones. Never true during the warm-up."""
        return bool(self._read(2))

    @property
    def usual(self) -> float:
        """The median norm of the window before this observation; NaN if there was none."""
        return self._read(3)

    @property
    def ok(self) -> bool:
        """Finite and no spike."""
        return self.finite and not self.spike

    def __repr__(self) -> str:
        word = "not finite" if not self.finite else "spike" if self.spike else "ok"
        return f"<GradHealth: {word}, norm {self.norm:.4g}, usually {self.usual:.4g}>"


def _median(values: Tensor) -> Tensor:
    """The lower median of what is not NaN; NaN if nothing is. Sorting is there on every device."""
    middle = (((~values.isnan()).sum() - 1).clamp(min=0) // 2).reshape(1)
    return values.sort().values.gather(0, middle).reshape(())


def _unscaled_norm(
    scaler: torch.amp.GradScaler | None, watched: Any, params: list[Tensor]
) -> Tensor:
    """The 2-norm without the scale, which some of these gradients may carry and others not."""
    scale = scaler._get_scale_async() if scaler is not None and scaler.is_enabled() else None
    if scaler is None or scale is None:
        return total_norm(params, 2.0).to(torch.float32)
    rest = {id(param): param for param in params}
    norms = []
    for key, state in scaler._per_optimizer_states.items():
        owner = state.get("optimizer", watched if key == id(watched) else None)
        if owner is not None:
            own = [rest.pop(id(p)) for p in gradients.params_of(owner) if id(p) in rest]
            norms.append(_norm_over(own, _carried_scale(state, scale)))
        elif state["stage"] is not OptState.READY and not hasattr(watched, "param_groups"):
            raise ArgumentError(
                "observe(scaler) cannot tell which gradients of a module are unscaled: "
                f"{type(scaler).__name__} does not say whose optimizer was unscaled or stepped. "
                "Watch the optimizer (GradMonitor(optimizer)), observe before unscale_(), "
                "leave scaler= out after it, or use amphal.GradScaler"
            )
    norms.append(_norm_over(list(rest.values()), scale))
    known = [norm for norm in norms if norm is not None]
    if len(known) < 2:
        return known[0] if known else total_norm(params, 2.0).to(torch.float32)
    together = torch.stack([norm.to(known[0].device) for norm in known])
    whole: Tensor = torch.linalg.vector_norm(together)
    return whole


def _norm_over(params: list[Tensor], scale: Tensor | None) -> Tensor | None:
    """The 2-norm divided by ``scale``; None without any gradient."""
    if all(param.grad is None for param in params):
        return None
    norm = total_norm(params, 2.0).to(torch.float32)
    return norm if scale is None else norm / scale.to(norm.device, non_blocking=True)


def _carried_scale(state: dict[str, Any], scale: Tensor) -> Tensor | None:
    """The scale that the gradients of one optimizer carry now; None if they are unscaled."""
    if state["stage"] is OptState.READY:
        return scale
    if state["stage"] is OptState.UNSCALED:
        return scale if "divisor" in state else None
    held: Tensor | None = state.get("held")  # a fused optimizer that skips does not unscale
    return None if held is None else torch.where(held != 0, scale.to(held.device), 1.0)


class GradMonitor:
    """Watches the norm of the gradients: one fused read of them, no host sync until asked.

    A norm is a spike if its logarithm lies more than ``threshold`` robust standard deviations (by
    the median absolute deviation, at least 5 %) above the median of the last ``window`` finite
    norms. A lasting change of level stops being a spike when half the window has seen it.

    Args:
        model_or_optimizer: whose gradients to watch.
        window: how many norms to remember.
        threshold: how far above the median a spike lies.
        warmup: how many finite norms must have been seen before anything is called a spike.
        skip: what :meth:`step` skips: ``"none"``, ``"nonfinite"`` or ``"spike"`` (those too).

    Example::

        monitor = amphal.GradMonitor(model, skip="nonfinite")
        loss.backward()
        monitor.step(optimizer)
        if step % 100 == 0 and not monitor.last.ok:
            print(monitor.last)

    Raises:
        ArgumentError, ArgumentTypeError: a value that is not allowed.
    """

    def __init__(
        self,
        model_or_optimizer: Any,
        *,
        window: int = 128,
        threshold: float = 6.0,
        warmup: int = 16,
        skip: str = "nonfinite",
    ) -> None:
        is_module = isinstance(model_or_optimizer, torch.nn.Module)
        if not is_module and not hasattr(model_or_optimizer, "param_groups"):
            raise ArgumentTypeError(
                "model_or_optimizer must be a torch.nn.Module or an optimizer, "
                f"got {type(model_or_optimizer).__name__} ({model_or_optimizer!r})"
            )
        self._watched = model_or_optimizer
        self._window = rules.integer("window", window, 3)
        self._threshold = rules.number("threshold", threshold, 0.0, math.inf, "more than 0")
        self._warmup = rules.integer("warmup", warmup, 2, self._window)
        if skip not in _SKIP:
            raise ArgumentError(
                f"skip must be 'none', 'nonfinite' or 'spike', got {skip!r}."
                f"{did_you_mean(str(skip), _SKIP)}"
            )
        self._skip = skip
        self._logs: Tensor | None = None  # a ring of log norms, NaN where nothing was seen yet
        self._counts: Tensor | None = None  # finite norms, not finite, spikes, skipped steps
        self._last: GradHealth | None = None
        self._outcome: StepOutcome | None = None

    def _params(self) -> list[Tensor]:
        if isinstance(self._watched, torch.nn.Module):
            return list(self._watched.parameters())
        return gradients.params_of(self._watched)

    @torch.no_grad()
    def observe(
        self, scaler: torch.amp.GradScaler | None = None, norm: Tensor | None = None
    ) -> GradHealth:
        """Look at the gradients that are there now, once an iteration, before the step.

        Args:
            scaler: the scaler of this loop, so that a scale which the gradients still carry is
                taken out.
            norm: the 2-norm of the unscaled gradients, where ``clip_grad_norm_`` has told it: then
                the gradients are not read again.
        """
        if norm is None:
            norm = _unscaled_norm(scaler, self._watched, self._params())
        elif not isinstance(norm, Tensor) or norm.numel() != 1:
            raise ArgumentTypeError(f"norm must be a tensor of one element, got {norm!r}")
        logs, counts = self._buffers(norm.device)
        norm = norm.detach().reshape(()).to(logs.device, torch.float32)
        log = norm.log()  # -inf for a norm of 0, which is no spike
        median = _median(logs)
        spread = (_median((logs - median).abs()) * _MAD).clamp(min=_LEAST_SPREAD)
        bad = gradients.nonfinite_flag(norm)
        warm = counts[0] >= self._warmup
        spike = (warm & (bad == 0) & (log > median + self._threshold * spread)).to(torch.float32)
        # A norm that is not finite, or 0, is not remembered: it says nothing about the usual one.
        usable = (bad == 0) & (norm > 0)
        here = torch.arange(self._window, device=logs.device) == counts[0] % self._window
        logs.copy_(torch.where(here & usable, log, logs))
        seen = torch.stack([usable.to(torch.float32), bad, spike, torch.zeros_like(bad)])
        counts += seen.to(torch.int64)
        self._last = GradHealth(torch.stack([norm, bad, spike, median.exp()]))
        return self._last

    def _buffers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._logs is None or self._counts is None:
            self._logs = torch.full((self._window,), math.nan, dtype=torch.float32, device=device)
            self._counts = torch.zeros(4, dtype=torch.int64, device=device)
        return self._logs, self._counts

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        norm: Tensor | None = None,
    ) -> Any:
        """Observe, then step, or skip what ``skip=`` says. With a fused optimizer no host sync.

        With an :class:`amphal.GradScaler` it stands for ``scaler.step(optimizer)``: an overflow is
        the scaler's to handle, and a step that is skipped as a spike does not move its scale. With
        a scaler that has a process group, enabled or not, its ranks step or skip together.

        Returns:
            What the optimizer's step returned; None if it was skipped.
        """
        rules.optimizer(optimizer)
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ArgumentTypeError(
                f"scaler must be an amphal.GradScaler or None, got {type(scaler).__name__}; "
                "with another one call observe(scaler) and scaler.step(optimizer)"
            )
        health = self.observe(scaler, norm)
        bad, spike = health.tensor[1], health.tensor[2]
        assert self._counts is not None
        if scaler is not None and scaler.is_enabled():
            veto = spike.clone() if self._skip == "spike" else None  # the scaler writes to it
            result = scaler._step_together([optimizer], (), {}, veto)[0]
            self._outcome = scaler.outcome(optimizer)
        else:
            vetoes = {"none": None, "nonfinite": bad, "spike": torch.maximum(bad, spike)}
            veto = vetoes[self._skip]
            if veto is not None and scaler is not None and scaler.process_group is not None:
                device = gradients.params_of(optimizer)[0].device  # a rank may have no gradient yet
                votes = veto.reshape(1).to(device, copy=True)
                veto = scaler._all_reduce(votes).reshape(())
            result = self._step_alone(optimizer, veto)
            if scaler is not None and self._outcome is not None:
                scaler._finish_step(optimizer, self._outcome)
        if veto is not None:
            self._counts[3] += veto.to(torch.int64)
        drop_stale_casts()
        return result

    def _step_alone(self, optimizer: Any, veto: Tensor | None) -> Any:
        if veto is None:
            self._outcome = StepOutcome(False)
            return optimizer.step()
        if is_fused(optimizer) and not needs_host(optimizer):
            self._outcome = StepOutcome(veto)
            optimizer.found_inf = veto
            try:
                return optimizer.step()
            finally:
                del optimizer.found_inf
        skip = bool(veto.item())
        self._outcome = StepOutcome(skip)
        return None if skip else optimizer.step()

    @property
    def last(self) -> GradHealth:
        """The latest observation."""
        if self._last is None:
            raise ScalerStateError("nothing was observed yet: call observe() or step() first")
        return self._last

    @property
    def outcome(self) -> StepOutcome:
        """What the latest :meth:`step` did."""
        if self._outcome is None:
            raise ScalerStateError("nothing was stepped yet: call step(optimizer) first")
        return self._outcome

    def _count(self, index: int) -> int:
        return 0 if self._counts is None else int(self._counts[index].item())

    @property
    def nonfinite(self) -> int:
        """Observations that were not finite. Waits for the device."""
        return self._count(1)

    @property
    def spikes(self) -> int:
        """Observations that were spikes. Waits for the device."""
        return self._count(2)

    @property
    def skipped(self) -> int:
        """Steps that this monitor skipped; an overflow under a scaler is the scaler's to count."""
        return self._count(3)


private.not_as_frames(__name__)
