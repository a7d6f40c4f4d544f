"""How a gradient scaler checks, unscales and steps: one decision for optimizers and ranks."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from .._torch import private
from ..errors import ArgumentError, ScalerStateError
from . import arguments as rules
from . import gradients
from . import names as grad_names
from .norms import Params, _clip_unscaled
from .optimizer_state import OptimizerState
from .optimizers import (
    _takes_scaler,
    drop_stale_casts,
    is_fused,
    needs_host,
    out_of_order,
)
from .outcome import StepOutcome
from .scale import LOST, Scale


class Stepper(Scale):
    """The part of a scaler that handles gradients and optimizers."""

    _process_group: Any

    def _state_of(self, optimizer: Any) -> OptimizerState:
        states, key = self._per_optimizer_states, id(optimizer)
        if key not in states:  # torch.compile loses an entry that a default factory has made
            states[key] = OptimizerState()
        state = states[key]
        state.optimizer = optimizer  # also keeps its id from being used again
        return state

    def _forget_untouched(self) -> None:
        """Before an error: leave no entry of an optimizer to which nothing has happened."""
        states = self._per_optimizer_states
        for key, state in list(states.items()):
            if state.stage is OptState.READY and not state.found_inf_per_device:
                del states[key]

    def _gather(
        self, optimizer: Any, *, allow_fp16: bool = False, coalesce: bool = False
    ) -> gradients.Groups:
        groups = gradients.gather(gradients.params_of(optimizer), coalesce=coalesce)
        if not allow_fp16 and any(dtype is torch.float16 for _, dtype, _ in groups):
            self._forget_untouched()
            names = grad_names.names_of_half(optimizer, self._names())
            raise ArgumentError(
                "the parameters are float16, so their gradients cannot be unscaled: "
                f"{grad_names.listed(names)}. Keep the parameters in float32 (no model.half()) "
                "and let autocast cast them"
            )
        return groups

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """torch's inner hook: unscale every gradient, give a flag per device."""
        # Duplicate indices of a sparse float16 gradient may overflow once they are summed. And a
        # parameter twice in a group, or two with one gradient tensor: divide it once.
        groups = gradients.distinct(
            self._gather(optimizer, allow_fp16=allow_fp16, coalesce=allow_fp16)
        )
        inverse = inv_scale.reshape(())  # torch takes one element of any shape
        return gradients.unscale_(
            groups, inverse, native=self._native, may_overflow=self._lower_bound() < 1.0
        )

    def _unscale_once(self, optimizer: Any, scale: Tensor) -> dict[torch.device, Tensor]:
        """Divide each gradient by what it is multiplied with; a flag per device."""
        parts = self._by_factor(optimizer)
        if parts is None:
            # The float32 reciprocal is the double one rounded: 53 bits are more than 2 x 24 + 1.
            inverse = scale.reciprocal()
            return self._unscale_grads_(optimizer, inverse, inverse, False)
        self._gather(optimizer)  # refuses float16 parameters
        flags: dict[torch.device, Tensor] = {}
        for factor, params in parts:
            inverse = torch.ones_like(scale) if factor is None else factor.reciprocal()
            groups = gradients.distinct(gradients.gather(params))
            found = gradients.unscale_(groups, inverse, native=self._native, may_overflow=True)
            for device, flag in found.items():
                flags[device] = torch.maximum(flags[device], flag) if device in flags else flag
        return flags

    def _by_factor(self, optimizer: Any) -> list[tuple[Tensor | None, list[Tensor]]] | None:
        """Parameters by what their gradients are multiplied with (None: unscaled).

        None for all: every gradient carries the scale of now, as in an ordinary loop.
        """
        if torch.compiler.is_compiling():  # which does not trace weak references
            return None
        if len(self._per_optimizer_states) > 1:
            self._settle_others(optimizer)
        usual = self._scale
        if 0 < self._scale_calls == self._calls_at_move and self._outcomes.get(optimizer) is None:
            # First seen, and no loss was scaled since the scale moved: these are older.
            usual = self._scale_of_losses
            if usual is None:
                raise ScalerStateError(
                    f"the gradients of this {type(optimizer).__name__} were computed before "
                    "update() or load_state_dict(), with a scale that is not known any more: step "
                    "every optimizer before scaler.update()"
                )
        if not self._ledger.alive() and usual is self._scale:
            return None
        moment = (self._moves, self._scale_calls)
        parts: dict[int, tuple[Tensor | None, list[Tensor]]] = {}
        for param in gradients.params_of(optimizer):
            if param.grad is not None:
                entry = self._ledger.find(param.grad, moment)
                factor = usual if entry is None else entry.factor
                parts.setdefault(id(factor), (factor, []))[1].append(param)
        if all(factor is self._scale for factor, _ in parts.values()):
            return None
        self._survived = self._notes_all = True
        return list(parts.values())

    def _settle_others(self, optimizer: Any) -> None:
        """Before gradients that another optimizer has handled are handled again."""
        own = _ids_of_grads(optimizer)
        for state in self._per_optimizer_states.values():
            if state.optimizer is optimizer or state.stage is OptState.READY:
                continue
            params = gradients.params_of(state.optimizer)
            shared = [p for p in params if p.grad is not None and id(p.grad) in own]
            if shared and not state.noted:
                self._survived = self._notes_all = True
                # A tensor that nobody has written into is of a later backward pass.
                if state.calls == self._scale_calls or any(
                    p.grad is not None and p.grad._version for p in shared
                ):
                    raise ScalerStateError(
                        f"{grad_names.listed(grad_names.names_of(shared, self._names()))}: "
                        f"shared with a {type(state.optimizer).__name__} that was handled in this "
                        "iteration, before this scaler knew of a second optimizer. Whether the "
                        "gradient is unscaled is not known: call zero_grad(), then "
                        "scaler.update(), and go on with the next iteration"
                    )
            if shared and state.stage is OptState.UNSCALED and state.divisor is not None:
                # A fused optimizer's clipping that waits for its step: do it here.
                assert self._scale is not None
                flag = gradients.any_flag(state.found_inf_per_device.values(), self._scale.device)
                assert flag is not None
                divisor = torch.where(flag != 0, self._scale, state.divisor.to(flag.device))
                gradients.multiply_(
                    gradients.distinct(gradients.gather(params)), divisor.reciprocal()
                )
                state.divisor = None
                self._note(state.optimizer, None)

    def _note(self, optimizer: Any, factor: Tensor | None) -> None:
        """The gradients of this optimizer are multiplied with ``factor`` now (None: unscaled)."""
        if torch.compiler.is_compiling():
            return
        params = gradients.params_of(optimizer)
        if not self._notes_all:
            params = next(([param] for param in params if param.grad is not None), [])
        self._ledger.note(params, factor, (self._moves, self._scale_calls))

    def _check_inf_per_device(self, optimizer: Any) -> dict[Any, Tensor]:
        """torch's hook for fused optimizers: the flags, with the gradients as they are."""
        scale, _ = self._check_scale_growth_tracker("step")
        groups = self._gather(optimizer)
        state = self._state_of(optimizer)
        sure = self._lower_bound() >= 1.0
        if gradients.distinct(groups) is not groups or self._by_factor(optimizer) is not None:
            self.unscale_(optimizer)  # the optimizer would divide by the scale at each occurrence
        elif gradients.is_plain(groups) and not (sure and self._native):
            state.found_inf_per_device = gradients.probe(groups, scale)
        elif sure:
            state.found_inf_per_device = gradients.check(groups)
        else:
            self.unscale_(optimizer)
        flags: dict[torch.device, Tensor] = state.found_inf_per_device
        return flags

    def _found_inf_per_device(self, optimizer: Any) -> dict[Any, Tensor]:
        flags: dict[torch.device, Tensor] = self._state_of(optimizer).found_inf_per_device
        return flags

    @private.out_of_graphs
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, in place, and check them. No sync.

        Optional: :meth:`step` does it. Needed only to look at the gradients or change them before;
        to clip them, :meth:`clip_grad_norm_` is cheaper.

        Raises:
            ScalerStateError: no loss was scaled yet.
            ScalerStateError: unscaled, clipped or stepped already since the last :meth:`update`.
            ArgumentError: the parameters are float16; the message names them.
        """
        rules.optimizer(optimizer)
        if self._enabled:
            self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer)
        if state.stage is not OptState.READY:
            raise out_of_order("unscale_", state)
        if not self._enabled:
            state.stage = OptState.UNSCALED
            return
        scale = self._scale
        assert scale is not None
        state.found_inf_per_device = self._unscale_once(optimizer, scale)
        state.stage = OptState.UNSCALED
        state.params = gradients.params_of(optimizer)
        state.calls, state.noted = self._scale_calls, self._notes_all
        if self._notes_all:
            self._note(optimizer, None)

    def _take_newcomers(self, optimizer: Any, state: OptimizerState) -> None:
        """Check and unscale what joined the optimizer after ``unscale_`` or a clip."""
        before, now = state.params, gradients.params_of(optimizer)
        if before is None or (len(before) == len(now) and all(map(operator.is_, before, now))):
            return
        known = set(map(id, before))
        joined = Params([param for param in now if id(param) not in known])
        groups = self._gather(joined)
        scale, _ = self._check_scale_growth_tracker("step")
        if state.divisor is None:
            inverse = scale.reciprocal()
            flags = self._unscale_grads_(joined, inverse, inverse, False)
        elif gradients.is_plain(groups):  # the optimizer divides these too
            flags = gradients.probe(groups, scale)
        else:
            flags = gradients.check(groups)
        for device, flag in flags.items():
            seen = state.found_inf_per_device.get(device)
            state.found_inf_per_device[device] = flag if seen is None else torch.maximum(seen, flag)
        if flags:
            state.recheck = None  # it would unscale these again
        state.params = now

    def _step_together(
        self,
        optimizers: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        veto: Tensor | None = None,
    ) -> list[Any]:
        """One decision for all; ``veto`` is a flag that skips without counting as an overflow.

        With a process group the veto becomes what its ranks agreed on.
        """
        self._check_scale_growth_tracker("step")
        states = [self._state_of(optimizer) for optimizer in optimizers]
        for state in states:
            if state.stage is OptState.STEPPED:
                self._forget_untouched()
                raise out_of_order("step", state)
            self._unmixed(state)
        shared = False
        if len(optimizers) > 1:
            seen: set[int] = set()
            for optimizer in optimizers:  # refuse before anything is unscaled
                self._gather(optimizer)
                ids = _ids_of_grads(optimizer)
                shared = shared or not seen.isdisjoint(ids)
                seen |= ids
        for optimizer, state in zip(optimizers, states, strict=True):
            if state.stage is OptState.READY and not _takes_scaler(optimizer):
                if is_fused(optimizer) and not shared:
                    self._check_inf_per_device(optimizer)
                else:
                    self.unscale_(optimizer)
            elif state.stage is OptState.UNSCALED:
                self._take_newcomers(optimizer, state)
        for state in states:
            state.nothing = not state.found_inf_per_device
        flag, veto = self._agree(states, veto)
        skip = None
        if flag is not None and any(map(needs_host, optimizers)):
            flag, skip = self._ask(states, flag, veto)
        gate = flag if veto is None or flag is None else torch.maximum(flag, veto)
        return [
            self._step_one(optimizer, state, gate, skip, args, kwargs)
            for optimizer, state in zip(optimizers, states, strict=True)
        ]

    def _agree(
        self, states: list[OptimizerState], veto: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """One flag and one veto for all these optimizers, and for all ranks if there is a group."""
        assert self._scale is not None
        flags = [f for state in states for f in state.found_inf_per_device.values()]
        flag = gradients.any_flag(flags, self._scale.device)
        alone = self._process_group is None
        if not alone:
            both = [torch.zeros_like(self._scale) if flag is None else flag]
            if veto is not None:
                both.append(veto.to(both[0]).reshape(both[0].shape))
            flag, *rest = self._all_reduce(torch.stack(both))  # one collective for the two
            veto = veto.copy_(rest[0].reshape(veto.shape)) if veto is not None else None
        if flag is not None and (len(states) > 1 or len(flags) > 1 or not alone):
            _set_flag(states, flag)
        return flag, veto

    def _ask(
        self, states: list[OptimizerState], flag: Tensor, veto: Tensor | None
    ) -> tuple[Tensor, bool]:
        """Let the host know the decision: one sync. The flag, and whether to skip."""
        if veto is None:
            found = skip = bool(flag.item())
        else:
            both = (flag != 0) + 2 * (veto.to(flag.device) != 0)
            code = int(both.item())  # in one transfer
            found, skip = bool(code & 1), bool(code)
        if found and self._process_group is None and any(s.recheck is not None for s in states):
            exact = recheck(self, states)
            if exact is not None:
                flag, found = exact, bool(exact.item())
                _set_flag(states, flag)
                skip = found or (veto is not None and bool(veto.item()))
        for state in states:
            state.found = found
        return flag, skip

    def _all_reduce(self, flags: Tensor) -> Tensor:
        """The largest over the ranks of each of these flags, which are overwritten."""
        if self._process_group is LOST:
            raise ScalerStateError(
                "this scaler had a process group when it was pickled, which cannot travel; "
                "set scaler.process_group to the group of this process, or to None"
            )
        import torch.distributed as dist

        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._process_group)
        return flags

    def _step_one(
        self,
        optimizer: Any,
        state: OptimizerState,
        flag: Tensor | None,
        skip: bool | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        result = None
        if _takes_scaler(optimizer):
            result = self._step_with_scaler(optimizer, args, kwargs)
            flag = gradients.any_flag(state.found_inf_per_device.values(), self._scale.device)  # type: ignore[union-attr]
            outcome = StepOutcome(flag if flag is not None else False)
        elif state.nothing:
            outcome = StepOutcome(False, nothing_to_do=True)
        else:
            assert flag is not None
            outcome = StepOutcome(flag if skip is None else skip)
            if is_fused(optimizer) and (state.stage is OptState.READY or state.divisor is not None):
                state.held = flag
            if not is_fused(optimizer):
                state.skip = skip
                result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
            elif not skip:
                result = self._step_fused(optimizer, state, flag, args, kwargs)
        state.stage, state.calls, state.noted = OptState.STEPPED, self._scale_calls, self._notes_all
        if state.held is None:
            self._note(optimizer, None)
        elif self._notes_all:
            assert self._scale is not None
            scale = self._scale.to(state.held.device)
            self._note(optimizer, torch.where(state.held != 0, scale, 1.0))
        self._finish_step(optimizer, outcome)
        return result

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """torch's inner hook: step unless a flag is set."""
        skip = optimizer_state.skip
        if skip is None:
            skip = any(v.item() for v in optimizer_state.found_inf_per_device.values())
        return None if skip else optimizer.step(*args, **kwargs)

    def _step_fused(
        self,
        optimizer: Any,
        state: OptimizerState,
        flag: Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Hand the divisor and the flag to an optimizer that unscales and skips by itself."""
        divisor = state.divisor
        if state.stage is OptState.READY:
            divisor = self._get_scale_async()
        own = getattr(optimizer, "grad_scale", None)  # one that the user has set already
        if own is not None:
            divisor = own if divisor is None else divisor * own
        optimizer.grad_scale, optimizer.found_inf = divisor, flag
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale
            del optimizer.found_inf

    def _step_with_scaler(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        warnings.warn(
            f"{type(optimizer).__name__}.step takes grad_scaler=, which torch is about to stop "
            "passing; let it read the attributes grad_scale and found_inf instead",
            FutureWarning,
            stacklevel=5,
        )
        return optimizer.step(*args, **{**kwargs, "grad_scaler": self})

    def _finish_step(self, optimizer: Any, outcome: StepOutcome) -> None:
        self._outcomes[optimizer] = outcome
        self._stepped = True
        if not outcome.nothing_to_do:
            drop_stale_casts()


def _ids_of_grads(optimizer: Any) -> set[int]:
    return {id(p.grad) for p in gradients.params_of(optimizer) if p.grad is not None}


def _set_flag(states: list[OptimizerState], flag: Tensor) -> None:
    for state in states:
        if state.own is None:
            state.own = state.found_inf_per_device
        state.found_inf_per_device = {flag.device: flag}


def recheck(scaler: Stepper, states: list[OptimizerState]) -> Tensor | None:
    """After a norm that was not finite: unscale and clip exactly. The flag of all these optimizers.

    A 2-norm can exceed float32 where no single gradient does. Rare, so it may wait for the device.
    """
    assert scaler._scale is not None
    again = []
    flags: list[Tensor] = []
    for state in states:
        own = state.found_inf_per_device if state.own is None else state.own
        if state.recheck is not None and any(flag.item() for flag in own.values()):
            own = scaler._unscale_once(state.optimizer, scaler._scale)
            again.append((gradients.params_of(state.optimizer), *state.recheck))
        flags += own.values()
    flag = gradients.any_flag(flags, scaler._scale.device)
    if flag is not None and not flag.item():
        for params, max_norm, norm_type in again:
            _clip_unscaled(scaler, params, max_norm, norm_type, False, ask=True)
    return flag


private.not_as_frames(__name__)
