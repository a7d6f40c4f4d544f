"""The integrations without their frameworks: what they decide, and what they say is missing.

The engines here are stand-ins with the few methods that the guard reads; the tests of the tox
environment ``integrations`` run the real ones.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

import amphal
from amphal.errors import ArgumentError, ArgumentTypeError, EngineWarning, MissingExtraError
from amphal.integrations import accelerate, deepspeed, fsdp, lightning, transformers

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def plan_of(precision: str) -> amphal.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amphal.PrecisionWarning)
        return amphal.detect("cpu", precision=precision)


@pytest.mark.parametrize(
    ("module", "extra", "call"),
    [
        ("accelerate", "accelerate", accelerate.accelerator),
        ("accelerate", "accelerate", lambda plan: accelerate.adopt(object(), plan)),
        ("lightning", "lightning", lightning.fabric_precision),
        ("lightning", "lightning", lightning.trainer_precision),
        ("transformers", "transformers", transformers.training_arguments),
        ("deepspeed", "deepspeed", lambda plan: deepspeed.initialize(plan, config={})),
    ],
)
def test_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, extra: str, call: Callable[[Any], object]
) -> None:
    """Without its framework an integration says what to install, and it is an ImportError."""
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    getattr(lightning, "_fabric_class").cache_clear()  # noqa: B009 - private, cleared for the test
    getattr(lightning, "_trainer_class").cache_clear()  # noqa: B009
    with pytest.raises(MissingExtraError, match=rf"pip install 'amphal\[{extra}\]'") as got:
        call(plan_of("fp32"))
    assert isinstance(got.value, ImportError)


def test_importing_them_imports_no_framework() -> None:
    """The modules of the integrations import their frameworks inside functions only."""
    import subprocess

    names = ["accelerate", "deepspeed", "fsdp", "lightning", "transformers"]
    code = "; ".join(f"import amphal.integrations.{name}" for name in names)
    code += "; import sys; print([n for n in ('accelerate', 'deepspeed', 'lightning', "
    code += "'transformers', 'torch.distributed.fsdp') if n in sys.modules])"
    command, elsewhere = [sys.executable, "-c", code], tempfile.gettempdir()
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=elsewhere)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "function",
    [
        accelerate.mixed_precision,
        accelerate.accelerator,
        deepspeed.config,
        fsdp.mixed_precision,
        lightning.fabric_precision,
        lightning.trainer_precision,
        transformers.fields,
        transformers.training_arguments,
    ],
)
def test_takes_a_plan(function: Callable[[Any], object]) -> None:
    """Anything but a plan is refused before a framework is looked for."""
    with pytest.raises(ArgumentTypeError, match=r"amphal\.Plan, got str"):
        function("bf16")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fsdp_policies(precision: str) -> None:
    """Both FSDPs compute in the plan's dtype and reduce in float32."""
    two = fsdp.mixed_precision(plan_of(precision))
    assert two == MixedPrecisionPolicy(param_dtype=LOW[precision], reduce_dtype=torch.float32)
    one = fsdp.mixed_precision(plan_of(precision), fsdp=1)
    assert one == MixedPrecision(param_dtype=LOW[precision], reduce_dtype=torch.float32)


def test_fsdp_of_a_full_precision_plan_casts_nothing() -> None:
    """For float32 the policies are the ones that FSDP has by default."""
    assert fsdp.mixed_precision(plan_of("fp32")) == MixedPrecisionPolicy()
    assert fsdp.mixed_precision(plan_of("fp32"), fsdp=1) == MixedPrecision()


def test_fsdp_settings() -> None:
    """A field can be set otherwise; one that does not exist is named, with those that do."""
    policy = fsdp.mixed_precision(plan_of("bf16"), reduce_dtype=torch.bfloat16)
    assert policy.reduce_dtype is torch.bfloat16
    with pytest.raises(ArgumentError, match="no field 'reduce'; it has param_dtype"):
        fsdp.mixed_precision(plan_of("bf16"), reduce=torch.bfloat16)
    with pytest.raises(ArgumentError, match="fsdp must be 2"):
        fsdp.mixed_precision(plan_of("bf16"), fsdp=3)  # type: ignore[call-overload]


OFF = {"enabled": False}


@pytest.mark.parametrize(
    ("precision", "by", "on"),
    [
        ("fp32", "autocast", {}),
        ("fp32", "engine", {}),
        ("bf16", "autocast", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
        ("fp16", "autocast", {"torch_autocast": {"enabled": True, "dtype": "float16"}}),
        ("bf16", "engine", {"bf16": {"enabled": True}}),
        ("fp16", "engine", {"fp16": {"enabled": True, "loss_scale": 0}}),
    ],
)
def test_deepspeed_blocks(precision: str, by: Any, on: dict[str, Any]) -> None:
    """Exactly one block is on, none for float32, and the others are off in so many words."""
    off = {"bf16": OFF, "fp16": OFF, "torch_autocast": OFF}
    assert deepspeed.config(plan_of(precision), by=by) == {**off, **on}


def test_deepspeed_refuses() -> None:
    """Another way of casting, and fp16 where an overflow cannot be seen."""
    with pytest.raises(ArgumentError, match="by must be"):
        deepspeed.config(plan_of("bf16"), by="magic")  # type: ignore[arg-type]
    import dataclasses

    blind = dataclasses.replace(plan_of("fp16"), use_scaler=False)
    with pytest.raises(ArgumentError, match="saturates"):
        deepspeed.config(blind)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_fields_of_the_others(precision: str) -> None:
    """Accelerate's and transformers' own words for the plan's precision."""
    plan = plan_of(precision)
    assert accelerate.mixed_precision(plan) == {"fp32": "no"}.get(precision, precision)
    fields = transformers.fields(plan)
    assert (fields["bf16"], fields["fp16"]) == (precision == "bf16", precision == "fp16")
    assert fields["use_cpu"] is True
    assert fields["optim"] == "adamw_torch_fused"


class StandIn(nn.Module):
    """An engine as the guard sees one: its settings, its device, forward and backward."""

    device = torch.device("cpu")

    def __init__(self, block: str, seen: list[Any]) -> None:
        super().__init__()
        self._block, self._seen = block, seen
        self.weight = nn.Parameter(torch.ones(4, 4))

    def bfloat16_enabled(self) -> bool:
        return self._block == "bf16"

    def fp16_enabled(self) -> bool:
        return self._block == "fp16"

    def torch_autocast_enabled(self) -> bool:
        return self._block == "torch_autocast"

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        self._look()
        with amphal.autocast("cpu", "bf16"):
            self._look()
        with amphal.autocast("cpu", enabled=False):
            self._look()
        if fail:
            raise RuntimeError("in forward")
        return x @ self.weight

    def backward(self, loss: Tensor) -> None:
        with amphal.autocast("cpu", "bf16"):  # as a recomputed block would
            self._look()
        loss.backward()

    def _look(self) -> None:
        self._seen.append(torch.is_autocast_enabled("cpu"))


pytestmark = pytest.mark.filterwarnings("ignore::amphal.errors.PrecisionWarning")


@pytest.mark.parametrize("block", ["bf16", "fp16", "torch_autocast"])
def test_regions_inside_an_engine_step_aside(block: str) -> None:
    """In an engine's forward and backward no region switches autocast on, and one note says so."""
    seen: list[bool] = []
    engine = deepspeed.guard(StandIn(block, seen))

    def train() -> None:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).sum())

    with pytest.warns(EngineWarning, match=rf"DeepSpeed engine \({block}\) owns") as notes:
        train()
    assert len(notes) == 1
    assert notes[0].filename == __file__
    assert seen == [False] * 8
    with amphal.autocast("cpu", "bf16"):
        assert torch.is_autocast_enabled("cpu")  # outside the engine regions are in force again


def test_a_region_around_an_engine_is_off_inside() -> None:
    """A surrounding region does not reach into the engine, and goes on after it."""
    seen: list[bool] = []
    engine = deepspeed.guard(StandIn("bf16", seen))
    with amphal.autocast("cpu", "bf16"):
        with pytest.warns(EngineWarning) as notes:
            engine(torch.ones(2, 4))
        assert torch.is_autocast_enabled("cpu")
    assert len(notes) == 1
    assert seen == [False] * 3
    assert not torch.is_autocast_enabled("cpu")


def test_an_engine_that_fails_leaves_nothing() -> None:
    """After an exception in the engine, regions are in force again."""
    engine = deepspeed.guard(StandIn("bf16", []))
    with pytest.warns(EngineWarning), pytest.raises(RuntimeError, match="in forward"):
        engine(torch.ones(2, 4), fail=True)
    with amphal.autocast("cpu", "bf16"):
        assert torch.is_autocast_enabled("cpu")


def test_an_engine_that_owns_nothing_is_left_alone() -> None:
    """In an fp32 engine regions are the ones that cast."""
    seen: list[bool] = []
    engine = deepspeed.guard(StandIn("", seen))
    engine(torch.ones(2, 4))
    assert seen == [False, True, False]


def test_guarding_twice_is_guarding_once() -> None:
    """A guarded engine is given back as it is."""
    engine = StandIn("bf16", [])
    assert deepspeed.guard(deepspeed.guard(engine)) is engine
    assert len(engine._forward_pre_hooks) == 1


def test_guards_engines_only() -> None:
    """Anything that does not answer as an engine does is refused."""
    with pytest.raises(ArgumentTypeError, match="got Linear, which has no bfloat16_enabled"):
        deepspeed.guard(nn.Linear(1, 1))


def test_every_integration_is_here() -> None:
    """Each file of the package has a public list of what it gives."""
    for name in ("accelerate", "deepspeed", "fsdp", "lightning", "transformers"):
        module = importlib.import_module(f"amphal.integrations.{name}")
        assert module.__all__ == sorted(module.__all__)
        assert all(callable(getattr(module, public)) for public in module.__all__)
