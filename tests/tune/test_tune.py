"""tune(): its arguments, its plan, what it leaves behind, its cache and its charts."""

from __future__ import annotations

import io
import json
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import amphal
from amphal._tune import candidates as _candidates
from amphal._tune import show as _tune_show
from amphal._tune import tuning as _tune
from amphal._tune.cache import folder
from amphal.contract import get_backend
from amphal.errors import (
    AmphalWarning,
    ArgumentError,
    ArgumentTypeError,
    MissingExtraError,
    TuneError,
    UnsupportedPrecisionError,
)
from amphal.testing import simulate

COSTS = {"fp32": 0.020, "bf16": 0.010, "fp16": 0.040, "fp32:medium": 0.015}
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
XEON = amphal.Hardware(
    "cpu", "a Xeon", architecture="x86_64", flags=frozenset({"amx_bf16", "avx512_bf16"})
)


class Clock:
    """A clock that only steps move, in place of the real one."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[Any] = []

    def perf_counter(self) -> float:
        return self.now

    def spend(self, plan: amphal.Plan, costs: dict[str, float] = COSTS) -> float:
        name = SHORT[plan.dtype]
        if plan.matmul_precision:
            name += f":{plan.matmul_precision}"
        self.calls.append(name)
        self.now += costs[name]
        return 1.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    for name in ("AMPHAL_DEVICE", "AMPHAL_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AMPHAL_DEVICE", "cpu")
    amphal.detect.cache_clear()
    monkeypatch.setenv("AMPHAL_CACHE_DIR", str(tmp_path / "cache"))
    found = Clock()
    monkeypatch.setattr(_tune, "time", found)
    return found


@pytest.fixture
def xeon() -> Any:
    with simulate(XEON):
        yield


def tune(step: Callable[..., Any], **how: Any) -> amphal.Plan:
    how = {"budget_s": 1.0, "candidates": ["fp32", "bf16", "fp16"], "state": (), **how}
    return amphal.tune(step, **how)


# The plan.


def test_the_fastest_is_chosen_and_the_table_is_its_reason(clock: Clock) -> None:
    """The rows, the sentences, and what detect() would have said."""
    plan = tune(clock.spend)
    assert (plan.dtype, plan.use_scaler) == (torch.bfloat16, False)
    assert plan.measured is not None
    rows = {row.candidate: row for row in plan.measured}
    assert list(rows) == ["fp32", "bf16", "fp16"]
    assert rows["fp32"].ratio == pytest.approx(2.0)
    assert rows["bf16"].seconds == pytest.approx(0.010)
    assert rows["fp16"].note == "clearly slower, so stopped early"
    said = plan.explain()
    assert "Chose bf16, the fastest here." in said
    assert "Measured fp32: 20 ms a step, 2.00 x the fastest" in said
    assert f"would choose {SHORT[amphal.detect().dtype]}." in said


def test_the_plan_keeps_its_measurements() -> None:
    """Frozen, hashable, picklable, JSON-able, and equal only to what measured the same."""
    plan = amphal.tune(lambda plan: None, budget_s=0.1, candidates=["fp32:medium"], state=())
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.matmul_precision == "medium"
    document = json.loads(json.dumps(plan.to_dict()))
    assert document["measured"][0]["candidate"] == "fp32:medium"
    assert document["matmul_precision"] == "medium"
    assert "float32 matmuls at 'medium' (plan.matmul())" in plan.explain()
    assert plan != amphal.detect()


def test_scattered_times_are_said_to_be_doubtful(clock: Clock) -> None:
    """On a busy machine the plan says what it rests on; on a quiet one there is no such word."""
    quiet = tune(clock.spend, candidates=["fp32", "bf16"])
    assert "scatter" not in quiet.explain()

    def disturbed(plan: amphal.Plan) -> float:
        busy = 3.0 if len(clock.calls) % 4 < 2 else 1.0
        return clock.spend(plan, {name: cost * busy for name, cost in COSTS.items()})

    plan = tune(disturbed, candidates=["bf16"], budget_s=5)
    assert plan.measured is not None
    assert plan.measured[0].spread is not None
    assert plan.measured[0].spread > 0.3
    assert "times of bf16 scatter by" in plan.explain()


def test_a_step_outside_its_region_is_asked_about(clock: Clock) -> None:
    """Equal losses to the last bit mean that nothing was cast; a real cast changes them."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(64, 64), torch.randn(8, 64)

    def forgot(plan: amphal.Plan) -> torch.Tensor:
        clock.spend(plan)
        return model(x).square().mean()

    def right(plan: amphal.Plan) -> torch.Tensor:
        clock.spend(plan)
        with plan.autocast():
            return model(x).float().square().mean()

    asked = "does the step compute inside plan.autocast()?"
    how: dict[str, Any] = {"candidates": ["fp32", "bf16"], "budget_s": 0.1, "device": "cpu"}
    assert asked in amphal.tune(forgot, **how).explain()
    assert asked not in amphal.tune(right, **how).explain()


def test_detect_sets_neither() -> None:
    """A plan that nothing was measured for has no rows and no matmul precision."""
    plan = amphal.detect()
    assert plan.measured is None
    assert plan.matmul_precision is None


def test_a_plan_refuses_another_matmul_precision() -> None:
    """Only torch's three."""
    import dataclasses

    with pytest.raises(ArgumentError, match="matmul_precision must be one of highest"):
        dataclasses.replace(amphal.detect(), matmul_precision="low")


def test_matmul_sets_and_restores(xeon: None) -> None:
    """Within plan.matmul() the process has the precision; afterwards what it had."""
    plan = tune(lambda plan: None, candidates=["fp32:medium"])
    mkldnn = getattr(torch.backends.mkldnn, "matmul", None)
    before = torch.get_float32_matmul_precision(), getattr(mkldnn, "fp32_precision", None)
    with pytest.raises(KeyError), plan.matmul():
        assert torch.get_float32_matmul_precision() == "medium"
        raise KeyError
    assert torch.get_float32_matmul_precision() == before[0]
    assert getattr(mkldnn, "fp32_precision", None) == before[1]
    with amphal.detect().matmul():
        assert torch.get_float32_matmul_precision() == before[0]


def test_matmul_is_put_back_in_any_order() -> None:
    """Blocks of threads overlap: when all are left, what was there before all of them is."""
    plan = amphal.detect("cpu", precision="fp32")
    high, medium = (replace(plan, matmul_precision=p).matmul() for p in ("high", "medium"))
    high.__enter__()
    medium.__enter__()
    high.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "medium"
    medium.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(KeyError), replace(plan, matmul_precision="high").matmul():
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"


def test_settings_are_put_back() -> None:
    """A step that sets the process's or the thread's settings leaves none of them behind."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark

    def step(plan: amphal.Plan) -> float:
        torch.set_float32_matmul_precision("high")
        torch.set_grad_enabled(False)
        torch.set_num_threads(threads + 1)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = not benchmark
        return 1.0

    amphal.tune(step, candidates=["fp32"], budget_s=0.01, state=())
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark is benchmark


@pytest.mark.parametrize("ops", [None, {"softmax": "fp32"}])
def test_an_interrupt_leaves_no_region(ops: Any) -> None:
    """Also one that falls after a region was entered and before anything leaves it."""

    def step(plan: amphal.Plan) -> float:
        amphal.autocast("cpu", dtype="bf16", ops=ops).__enter__()
        torch.autocast("cpu", dtype=torch.float16, cache_enabled=False).__enter__()
        raise KeyboardInterrupt

    with amphal.autocast("cpu", dtype="bf16", enabled=False):
        outside = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        with pytest.raises(KeyboardInterrupt):
            amphal.tune(step, device="cpu", candidates=["fp32"], state=())
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        assert torch.is_autocast_cache_enabled()
        assert torch.autocast_increment_nesting() == outside
        torch.autocast_decrement_nesting()
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def test_matmul_refuses_a_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's newer setting is in use, the older one is refused, and what to do is said."""

    def mixed() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    with pytest.raises(ArgumentError, match="fp32_precision, and torch refuses a mix"):
        tune(lambda plan: None, candidates=["fp32:medium"])


# Candidates.


def test_all_that_the_hardware_can_do(xeon: None, clock: Clock) -> None:
    """None names every dtype that is not absent, and the matmul precisions that matter."""
    amphal.tune(clock.spend, budget_s=1, state=())
    assert set(clock.calls) == {"fp32", "fp32:medium", "bf16", "fp16"}


def test_what_is_set_already_is_no_candidate(xeon: None, clock: Clock) -> None:
    """fp32 runs under the setting that is there."""
    torch.set_float32_matmul_precision("medium")
    try:
        amphal.tune(clock.spend, budget_s=1, state=())
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "fp32:medium" not in clock.calls


def test_tf32_is_a_candidate_where_it_exists() -> None:
    """By the backend's declaration: compute capability 8.0 and later."""
    backend = get_backend("cuda")
    known = amphal.known_hardware()
    assert backend.float32_matmul(known["t4"].hardware) == {}
    matmuls = dict(backend.float32_matmul(known["a100"].hardware))
    base = amphal.detect(known["a100"].hardware)
    plans = _candidates.usual_candidates(base, matmuls, "highest", True)
    assert list(plans) == ["fp32", "tf32", "bf16", "fp16"]
    assert plans["tf32"].matmul_precision == "high"
    assert plans["fp16"].use_scaler


def test_the_environment_names_the_only_candidate(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMPHAL_PRECISION wins over the hardware here too; candidates= wins over it."""
    monkeypatch.setenv("AMPHAL_PRECISION", "fp32")
    amphal.detect.cache_clear()
    assert amphal.tune(clock.spend, budget_s=1, state=()).dtype is torch.float32
    assert set(clock.calls) == {"fp32"}
    assert tune(clock.spend).dtype is torch.bfloat16


def test_dtypes_and_plans_are_candidates(clock: Clock) -> None:
    """Beside names."""
    plan = tune(
        clock.spend, candidates=[torch.float32, amphal.detect(precision="fp32"), "bf16"][1:]
    )
    assert plan.dtype is torch.bfloat16
    assert tune(clock.spend, candidates=[torch.float32]).dtype is torch.float32


@pytest.mark.parametrize(
    ("candidates", "error", "said"),
    [
        ([], ArgumentError, "candidates is empty"),
        (["bf61"], ArgumentError, "Did you mean 'bf16'"),
        (["bf16", torch.bfloat16], ArgumentError, "'bf16' is named twice"),
        ("bf16", ArgumentTypeError, "must be a list of names"),
        (
            [16],
            ArgumentTypeError,
            "each must be a name, a torch dtype or an amphal.Plan",
        ),
        ([torch.int8], UnsupportedPrecisionError, "int8"),
        (["tf32"], UnsupportedPrecisionError, "has no TF32"),
    ],
)
def test_other_candidates_are_errors(candidates: Any, error: type[Exception], said: str) -> None:
    """Each says what is allowed."""
    with pytest.raises(error, match=said):
        tune(lambda plan: None, candidates=candidates)


def test_a_plan_for_another_device_is_no_candidate() -> None:
    """Candidates run on one device."""
    other = amphal.detect(amphal.known_hardware()["t4"].hardware)
    with pytest.raises(ArgumentError, match="a plan for cuda cannot be compared on cpu"):
        tune(lambda plan: None, candidates=[other])


def test_a_plan_for_other_hardware_is_no_candidate() -> None:
    """A description of another CPU has the same device, and is not what is measured."""
    other = amphal.detect(XEON)
    with pytest.raises(ArgumentError, match="a plan for a Xeon cannot be measured on"):
        tune(lambda plan: None, candidates=[other])


# Arguments and errors.


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"budget_s": 0}, ArgumentError, "budget_s must be more than 0"),
        ({"budget_s": 10**400}, ArgumentError, "more than 0 and finite"),
        ({"budget_s": float("nan")}, ArgumentError, "budget_s must be more than 0"),
        (
            {"budget_s": "10"},
            ArgumentTypeError,
            "budget_s must be a number of seconds",
        ),
        ({"rtol": -1}, ArgumentError, "rtol must be 0 or more"),
        ({"rtol": "5%"}, ArgumentTypeError, "rtol must be a number"),
        ({"chart": "chart.svg"}, ArgumentError, "must be 'text', the path of a .png"),
        ({"chart": 3}, ArgumentTypeError, "must be 'text', the path of a .png"),
        ({"chart": "/no/such/a.png"}, ArgumentError, "there is no folder"),
        ({"cache": ""}, ArgumentError, "cache must be a name"),
        ({"cache": True}, ArgumentTypeError, "cache must be a name"),
        ({"state": [3]}, ArgumentTypeError, "state must name modules"),
        ({"process_group": 3}, ArgumentTypeError, "process_group must be a"),
    ],
)
def test_bad_arguments(how: dict[str, Any], error: type[Exception], said: str) -> None:
    """Found before anything is run."""
    calls = []
    with pytest.raises(error, match=said):
        tune(lambda plan: calls.append(1), **how)
    assert not calls


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (3, "step must be a function"),
        (nn.Linear, "step must be a function"),
        (lambda a, b, c: None, "needs more than a plan and a scaler"),
        (lambda plan, *, batch: None, "needs more than a plan and a scaler"),
    ],
)
def test_bad_steps(step: Any, said: str) -> None:
    """What it may be is said."""
    with pytest.raises(ArgumentTypeError, match=said):
        tune(step)


def test_nobody_left_is_an_error_with_all_reasons(clock: Clock) -> None:
    """Each candidate's, and the first error as the cause."""

    def step(plan: amphal.Plan) -> float:
        clock.spend(plan)
        if plan.dtype is torch.float32:
            raise RuntimeError("out of memory")
        return float("nan")

    with pytest.raises(TuneError, match="fp32: RuntimeError: out of memory; bf16: its loss") as e:
        tune(step)
    assert str(e.value.__cause__) == "out of memory"


# How the step is called.


def test_a_scaler_of_its_own_for_each_candidate(clock: Clock) -> None:
    """step(plan, scaler): one a candidate, that scales where its plan does."""
    scalers: dict[torch.dtype, Any] = {}

    def step(plan: amphal.Plan, scaler: amphal.GradScaler) -> float:
        assert scalers.setdefault(plan.dtype, scaler) is scaler
        assert scaler.is_enabled() is plan.use_scaler
        return clock.spend(plan)

    tune(step)
    assert len({id(scaler) for scaler in scalers.values()}) == 3
    assert scalers[torch.float16].is_enabled()


def test_a_step_without_arguments_runs_in_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inference: the candidate's autocast is on around it."""
    model, x, seen = nn.Linear(4, 4), torch.ones(2, 4), set()
    counter = iter(range(10**6))
    monkeypatch.setattr(_tune, "time", SimpleNamespace(perf_counter=lambda: next(counter) * 1e-3))

    def step() -> torch.Tensor:
        with torch.no_grad():
            y = model(x)
        seen.add(y.dtype)
        return y

    tune(step, candidates=["fp32", "bf16"])
    assert seen == {torch.float32, torch.bfloat16}


def test_a_step_without_arguments_must_not_train() -> None:
    """A backward pass inside the region is refused, by its optimizer or by its gradients."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def trains() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    def backward() -> None:
        model(torch.ones(1, 2)).sum().backward()

    before = model.weight.clone()
    for step, why in ((trains, "it holds an optimizer"), (backward, "it left gradients")):
        with pytest.raises(ArgumentError, match=why):
            tune(step, candidates=["fp32", "bf16"], state=None)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_gradients_of_before_are_not_those_of_a_step_without_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inference on a model that was trained a moment ago is inference; its gradients stay."""
    counter = iter(range(10**6))
    monkeypatch.setattr(_tune, "time", SimpleNamespace(perf_counter=lambda: next(counter) * 1e-3))
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    model(x).sum().backward()
    grad = model.weight.grad
    assert grad is not None
    before = grad.clone()

    plan = tune(lambda: model(x), candidates=["fp32", "bf16"], state=None)
    assert plan.measured
    assert model.weight.grad is grad
    assert torch.equal(grad, before)

    with pytest.raises(ArgumentError, match="it left gradients"):
        tune(lambda: model(x).sum().backward(), candidates=["fp32", "bf16"], state=None)
    assert torch.equal(grad, before)


# What is left behind.


def training(clock: Clock, fail: Callable[[int], None] = lambda call: None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 4)
    losses: list[tuple[str, float]] = []

    def step(plan: amphal.Plan, scaler: amphal.GradScaler) -> torch.Tensor:
        fail(len(clock.calls))
        clock.spend(plan)
        optimizer.zero_grad()
        with plan.autocast():
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append((clock.calls[-1], float(loss.detach())))
        return loss

    return SimpleNamespace(model=model, optimizer=optimizer, step=step, losses=losses)


def test_a_training_step_leaves_nothing_behind(clock: Clock) -> None:
    """Weights, buffers, optimizer, gradients and random numbers are bit for bit as before."""
    work = training(clock)
    before = {k: v.clone() for k, v in work.model.state_dict().items()}
    drawn = torch.get_rng_state()
    plan = tune(work.step, state=None)
    assert plan.dtype is torch.bfloat16
    assert all(torch.equal(v, before[k]) for k, v in work.model.state_dict().items())
    assert not work.optimizer.state
    assert all(p.grad is None for p in work.model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert work.model.training


def test_candidates_start_alike(clock: Clock) -> None:
    """The first loss of each is that of the same weights, dropout included."""
    work = training(clock)
    tune(work.step, state=None)
    firsts: dict[str, Any] = {}
    for name, loss in work.losses:
        firsts.setdefault(name, loss)
    assert firsts["bf16"] == pytest.approx(firsts["fp32"], rel=0.02)
    assert firsts["fp16"] == pytest.approx(firsts["fp32"], rel=0.02)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("after", [2, 15])
def test_an_interrupt_puts_everything_back(
    clock: Clock, error: type[BaseException], after: int
) -> None:
    """In a trial or in the rounds; the matmul precision too."""

    def fail(call: int) -> None:
        if call >= after:
            raise error

    work = training(clock, fail)
    before = {k: v.clone() for k, v in work.model.state_dict().items()}
    with pytest.raises(error):
        tune(work.step, candidates=["fp32:medium", "bf16"], state=None)
    assert len(clock.calls) == after
    assert all(torch.equal(v, before[k]) for k, v in work.model.state_dict().items())
    assert not work.optimizer.state
    assert torch.get_float32_matmul_precision() == "highest"


def test_state_names_what_is_put_back(clock: Clock) -> None:
    """Only that: what is not named stays as the steps left it."""
    kept, left = torch.zeros(1), torch.zeros(1)

    def step(plan: amphal.Plan) -> float:
        kept.add_(1)
        left.add_(1)
        return clock.spend(plan)

    tune(step, state=[kept])
    assert kept.item() == 0
    assert left.item() > 0


GLOBAL_MODEL = nn.Linear(2, 1)
GLOBAL_OPTIMIZER = torch.optim.SGD(GLOBAL_MODEL.parameters(), lr=0.1, momentum=0.9)


def test_an_optimizer_that_is_not_held_does_not_step() -> None:
    """Without state=, one that the search did not see is an error before it writes anything."""
    model = nn.Linear(2, 1)

    def step(plan: amphal.Plan) -> torch.Tensor:
        loss = (model(torch.ones(1, 2)) + GLOBAL_MODEL(torch.ones(1, 2))).sum()
        loss.backward()
        GLOBAL_OPTIMIZER.step()
        return loss

    before = GLOBAL_MODEL.weight.detach().clone()
    with pytest.raises(
        ArgumentError, match=r"an optimizer \(SGD\) that its function does not hold"
    ):
        tune(step, state=None)
    assert torch.equal(GLOBAL_MODEL.weight, before)
    assert not GLOBAL_OPTIMIZER.state
    GLOBAL_MODEL.zero_grad()
    GLOBAL_OPTIMIZER.step()  # the check has ended with tune()


def test_threads_measure_one_after_the_other(clock: Clock) -> None:
    """Two at once would measure each other."""
    inside, most = [0], [0]

    def step(plan: amphal.Plan) -> float:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        clock.spend(plan)
        threading.Event().wait(0.0005)
        inside[0] -= 1
        return 1.0

    threads = [threading.Thread(target=tune, args=(step,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1


# The cache.


def test_a_cached_answer_runs_nothing(clock: Clock) -> None:
    """The same plan, with its rows, and it says where it comes from."""
    first = tune(clock.spend, cache="my step")
    calls = len(clock.calls)
    second = tune(clock.spend, cache="my step")
    assert len(clock.calls) == calls
    assert second.measured == first.measured
    assert second.dtype is first.dtype
    assert "read from the cache" in second.explain()


@pytest.mark.parametrize("change", ["name", "candidates", "threads", "hardware", "torch"])
def test_another_question_is_measured(
    clock: Clock, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the answer hangs on belongs to its key."""
    tune(clock.spend, cache="my step")
    calls = len(clock.calls)
    how: dict[str, Any] = {"cache": "my step"}
    if change == "name":
        how["cache"] = "another"
    elif change == "candidates":
        how["candidates"] = ["fp32", "bf16"]
    elif change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    elif change == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    if change == "hardware":
        with simulate(XEON):
            tune(clock.spend, **how)
    else:
        tune(clock.spend, **how)
    assert len(clock.calls) > calls


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"chosen": "bf16"', '"chosen": "fp64"'),
        lambda text: text.replace('"rounds"', '"circles"'),
        lambda text: text.replace('"dropped": false', '"dropped": 3'),
        lambda text: "\x00\ufffd",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"seconds": ', '"seconds": -'),
        lambda text: text.replace('"chosen": "bf16"', '"chosen": "fp8"').replace(
            '"candidate": "bf16"', '"candidate": "fp8"'
        ),
    ],
)
def test_a_damaged_entry_costs_a_warning(clock: Clock, spoil: Callable[[str], str]) -> None:
    """The step is measured anew, and the entry is sound again."""
    tune(clock.spend, cache="x")
    (path,) = (folder() / "tune").iterdir()
    path.write_text(spoil(path.read_text(encoding="utf-8")), encoding="utf-8")
    calls = len(clock.calls)
    with pytest.warns(AmphalWarning, match="damaged, so this step is measured anew"):
        assert tune(clock.spend, cache="x").dtype is torch.bfloat16
    assert len(clock.calls) > calls
    assert tune(clock.spend, cache="x").dtype is torch.bfloat16


def test_a_cache_that_cannot_be_written_costs_a_warning(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file where the folder should be; the answer is given all the same."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AMPHAL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(AmphalWarning, match="AMPHAL_CACHE_DIR names another folder") as said:
        assert tune(clock.spend, cache="x").dtype is torch.bfloat16
    assert len(said) == 1
    assert Path(said[0].filename).name == "test_tune.py"


def test_nothing_is_written_without_a_name(clock: Clock) -> None:
    """No cache by default, and no files left over with one."""
    tune(clock.spend)
    assert not folder().exists()
    tune(clock.spend, cache="a/b c")
    assert [p.suffix for p in (folder() / "tune").iterdir()] == [".json"]


@pytest.mark.parametrize(
    ("platform", "variable", "value", "end"),
    [
        ("linux", "XDG_CACHE_HOME", "/caches", ("caches", "amphal")),
        ("linux", "XDG_CACHE_HOME", "relative", (".cache", "amphal")),
        ("darwin", "XDG_CACHE_HOME", "", ("Library", "Caches", "amphal")),
        ("win32", "LOCALAPPDATA", "/local", ("local", "amphal")),
        ("win32", "LOCALAPPDATA", "", ("AppData", "Local", "amphal")),
    ],
)
def test_the_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, variable: str, value: str, end: tuple[str, ...]
) -> None:
    """Where each system keeps users' caches."""
    monkeypatch.delenv("AMPHAL_CACHE_DIR")
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setenv(variable, value)
    assert folder().parts[-len(end) :] == end


# What is shown.


def test_bars_of_text(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a candidate on stdout, the chosen one marked."""
    tune(clock.spend, chart="text")
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if "bf16" in line and "█" in line)
    assert "10 ms" in line
    assert "chosen" in line


def test_why_one_was_dropped_stands_below_the_bars(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reason is a sentence, which a narrow column would break into many lines."""

    def step(plan: amphal.Plan) -> float:
        return clock.spend(plan) + (plan.dtype is torch.float16)

    tune(step, chart="text")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.split()[:1] == ["fp16"]] == [["fp16", "dropped"]]
    assert any(line.startswith("dropped fp16: its loss of step 1 is 1 off") for line in lines)


def test_bars_where_blocks_cannot_be_printed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal of ASCII the bars are of other signs."""
    out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, encoding="ascii", write_through=True))
    tune(clock.spend, chart="text")
    assert b"###" in out.getvalue()


@pytest.mark.parametrize("chart", ["text", "a.png"])
def test_a_chart_that_fails_costs_a_warning(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chart: str
) -> None:
    """What was measured is worth more: the plan is returned all the same."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed)
    monkeypatch.setattr(_tune_show, "_save_png", lambda *given: closed.write(""))
    with pytest.warns(AmphalWarning, match=r"chart='.*' cannot be"):
        plan = tune(clock.spend, chart=chart if chart == "text" else tmp_path / chart)
    assert plan.dtype is torch.bfloat16


def test_a_png_is_no_folder(clock: Clock, tmp_path: Path) -> None:
    """Found before anything is measured."""
    (tmp_path / "a.png").mkdir()
    with pytest.raises(ArgumentError, match="is a folder"):
        tune(clock.spend, chart=tmp_path / "a.png")


def test_a_png(clock: Clock, tmp_path: Path) -> None:
    """Saved by matplotlib, without pyplot; drawn from the cache as well."""
    for name in ("a.png", "b.png"):
        tune(clock.spend, chart=tmp_path / name, cache="x")
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 5000


def test_a_png_without_matplotlib(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named before anything is measured."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'amphal\[charts\]'"):
        tune(clock.spend, chart="a.png")
    assert not clock.calls


def test_no_progress_where_there_is_no_terminal(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is printed unless it is asked for."""
    tune(clock.spend)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_progress_on_a_terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar on stderr that names what runs; progress=False leaves it out."""
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    tune(clock.spend, progress=False)
    assert screen.getvalue() == ""
    tune(clock.spend)
    assert "amphal.tune" in screen.getvalue()
