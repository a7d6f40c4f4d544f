"""``detect()`` and ``Plan``: a choice that you can act on."""

from __future__ import annotations

from typing import Any, Protocol, cast

from ._autocast import Region, autocast
from ._choice import Choice, choose
from ._scaler import GradScaler
from ._torch import private
from .contract import DeviceLike, PrecisionLike


class Plan(Choice):
    """What mixed precision should be on one device, and why. Immutable, hashable, picklable."""

    def autocast(self, *, enabled: bool = True, cache_enabled: bool | None = None) -> Region:
        """A region of this plan's dtype on this plan's device: ``amphal.autocast(plan)``."""
        return autocast(self, enabled=enabled, cache_enabled=cache_enabled)

    def grad_scaler(self, **kwargs: Any) -> GradScaler:
        """``amphal.GradScaler(plan, **kwargs)``: it scales only where the plan needs it."""
        return GradScaler(self, **kwargs)


class _Detect(Protocol):
    def __call__(
        self,
        device: DeviceLike | None = None,
        *,
        precision: PrecisionLike = "auto",
        process_group: Any = None,
    ) -> Plan: ...

    def cache_clear(self) -> None: ...


_plans: dict[int, tuple[Choice, Plan]] = {}
_MOST = 256
choose.on_clear(_plans.clear)


def _detect(
    device: DeviceLike | None = None,
    *,
    precision: PrecisionLike = "auto",
    process_group: Any = None,
) -> Plan:
    choice = choose.detect(device, precision=precision, process_group=process_group)
    found = _plans.get(id(choice))
    if found is None:
        if len(_plans) >= _MOST:
            _plans.clear()
        found = _plans[id(choice)] = choice, Plan(**vars(choice))
    return found[1]


_detect.__doc__ = choose.detect.__doc__
_detect.__name__ = _detect.__qualname__ = "detect"
_detect.cache_clear = choose.detect.cache_clear  # type: ignore[attr-defined]
detect = cast(_Detect, _detect)


private.not_as_frames(__name__)
