"""``tune(process_group=...)``: ranks measure in lock step and choose alike."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers.ranks import Ranks

import amphal
from amphal._tune import tuning as _tune
from amphal.errors import ArgumentError

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Clock:
    def __init__(self) -> None:
        self.now, self.steps = 0.0, 0

    def perf_counter(self) -> float:
        return self.now


def tuned(
    costs: list[dict[str, float]],
    fails: dict[int, str],
    group: bool = True,
    raises_at: int | None = None,
) -> Any:
    """This rank's choice and number of steps, each step with a collective; or the error."""
    rank, clock = dist.get_rank(), Clock()
    calls: Counter[str] = Counter()

    def step(plan: amphal.Plan) -> float:
        name = SHORT[plan.dtype]
        value = torch.ones(1)
        dist.all_reduce(value)
        clock.now += costs[rank][name]
        clock.steps += 1
        calls[name] += 1
        if fails.get(rank) == name and raises_at is not None:
            if calls[name] == raises_at:
                raise RuntimeError("a cable was pulled")
            return float(value)
        return float("nan") if fails.get(rank) == name else float(value)

    try:
        with mock.patch.object(_tune, "time", clock):
            plan = amphal.tune(
                step,
                candidates=list(costs[rank]),
                budget_s=1,
                device="cpu",
                state=(),
                process_group=dist.group.WORLD if group else None,
            )
    except amphal.AmphalError as exc:
        return exc
    return SHORT[plan.dtype], clock.steps, plan.measured


def test_the_slowest_rank_counts(two_ranks: Ranks) -> None:
    """bf16 is fast on one rank and slow on the other: both take fp32, after equally many steps."""
    costs = [{"fp32": 0.02, "bf16": 0.01}, {"fp32": 0.01, "bf16": 0.05}]
    (first, steps, rows), (second, others, same) = two_ranks(tuned, costs, {})
    assert first == second == "fp32"
    assert steps == others
    assert rows == same


def test_what_fails_on_one_rank_fails_on_all(two_ranks: Ranks) -> None:
    """A loss that is not finite on rank 1 drops the candidate on rank 0 too."""
    costs = [{"fp32": 0.02, "bf16": 0.01}] * 2
    answers = two_ranks(tuned, costs, {1: "bf16"})
    assert [chosen for chosen, _, _ in answers] == ["fp32", "fp32"]
    assert all(rows[1].note == "its loss is nan" for _, _, rows in answers)


def test_who_raises_in_a_round_on_one_rank_is_dropped_on_all(two_ranks: Ranks) -> None:
    """In the second round, after three trials and the first round's two steps; nobody waits."""
    costs = [{"fp32": 0.02, "bf16": 0.01}] * 2
    answers = two_ranks(tuned, costs, {1: "bf16"}, True, 6)
    assert [chosen for chosen, _, _ in answers] == ["fp32", "fp32"]
    assert [rows[1].note for _, _, rows in answers] == ["RuntimeError: a cable was pulled"] * 2


def test_only_common_candidates_run(two_ranks: Ranks) -> None:
    """Ranks of different hardware measure what all of them can do."""
    costs = [{"fp32": 0.02, "bf16": 0.01, "fp16": 0.001}, {"bf16": 0.01, "fp32": 0.02}]
    answers = two_ranks(tuned, costs, {})
    assert [chosen for chosen, _, _ in answers] == ["bf16", "bf16"]
    answers = two_ranks(tuned, [{"fp32": 0.02}, {"bf16": 0.01}], {})
    assert all("no candidate in common" in str(error) for error in answers)


def test_several_ranks_need_a_group(two_ranks: Ranks) -> None:
    """Without one they would run different numbers of steps."""
    for error in two_ranks(tuned, [{"fp32": 0.02}] * 2, {}, False):
        assert isinstance(error, ArgumentError)
        assert "tune() in a job of 2 ranks needs process_group=" in str(error)
