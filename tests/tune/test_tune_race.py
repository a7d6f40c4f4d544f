"""The race of candidates on a clock that only steps move: who is tried, timed, stopped, chosen."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amphal._torch.private import frames_compiled
from amphal._tune.decisions import Lane, winner
from amphal._tune.race import Race
from amphal._tune.step import Seen, compare, see
from amphal.errors import ArgumentTypeError


class World:
    """Steps that take the seconds they are told to, on a clock of their own."""

    def __init__(self, costs: dict[str, float | Callable[[int], float]]) -> None:
        self.costs, self.now = costs, 0.0
        self.calls: Counter[str] = Counter()
        self.results: dict[str, Any] = {}
        self.skipped: Counter[str] = Counter()
        self.since_reset = self.compilations = 0
        self.starts: list[tuple[str, int]] = []

    def clock(self) -> float:
        return self.now

    def step(self, name: str) -> Any:
        cost = self.costs[name]
        self.starts.append((name, self.since_reset))
        self.now += cost(self.calls[name]) if callable(cost) else cost
        self.calls[name] += 1
        self.since_reset += 1
        result = self.results.get(name, 1.0)
        return result(self) if callable(result) else result

    def reset(self) -> None:
        self.since_reset = 0

    def wait(self) -> None: ...

    def skips(self, name: str) -> int:
        return self.skipped[name]

    def compiled(self) -> int:
        return self.compilations

    def within(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def race(world: World, budget: float = 10.0, rtol: float | None = 0.05, **how: Any) -> list[Lane]:
    return Race(list(world.costs), world, clock=world.clock, budget=budget, rtol=rtol, **how).run()


def lane(lanes: list[Lane], name: str) -> Lane:
    return next(one for one in lanes if one.name == name)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-5, 5.0), min_size=1, max_size=5), st.integers(0, 4))
def test_the_choice_is_within_two_percent_of_the_best(costs: list[float], which: int) -> None:
    """For any times of steps, whichever is preferred, by whatever is stopped early."""
    named = {f"c{i}": cost for i, cost in enumerate(costs)}
    chosen = winner(race(World(dict(named))), preferred=f"c{which}").name
    assert named[chosen] <= 1.021 * min(costs)


@pytest.mark.parametrize("seed", range(8))
def test_spikes_do_not_change_the_choice(seed: int) -> None:
    """Every fifth step is interrupted for many times its length: the choice stays within 5 %."""
    noise = random.Random(seed)

    def disturbed(seconds: float) -> Callable[[int], float]:
        return lambda call: (
            seconds * (1 + noise.random() * 0.1 + (noise.random() < 0.2) * noise.random() * 20)
        )

    costs = {"fp32": 0.010, "bf16": 0.0091, "fp16": 0.0125}
    world = World({name: disturbed(seconds) for name, seconds in costs.items()})
    assert costs[winner(race(world), "fp32").name] <= 1.05 * 0.0091


def test_among_equals_the_unmeasured_choice_is_taken() -> None:
    """Within 2 % the preferred one wins; without it the first, which is the most precise."""
    world = World({"fp32": 0.0100, "bf16": 0.0099, "fp16": 0.01005})
    lanes = race(world)
    assert winner(lanes, "fp16").name == "fp16"
    assert winner(lanes, "tf32").name == "fp32"


def test_preference_does_not_outweigh_time() -> None:
    """5 % slower is slower, preferred or not."""
    world = World({"fp32": 0.0100, "bf16": 0.0105})
    assert winner(race(world), "bf16").name == "fp32"


def test_one_hopeless_step_is_all_that_is_spent() -> None:
    """A candidate 100 x slower than the others is not run a second time."""
    world = World({"fp32": 0.05, "fp16": 5.0})
    lanes = race(world)
    assert world.calls["fp16"] == 1
    assert lane(lanes, "fp16").dropped == "one step took 5 s, 100 x the fastest's first"
    assert lane(lanes, "fp32").running


def test_a_first_step_that_compiles_is_not_held_against_anybody() -> None:
    """Only the first step is slow: it counts neither as time nor into the budget."""
    world = World(
        {"a": lambda call: 0.2 if call else 30.0, "b": lambda call: 0.1 if call else 30.0}
    )
    lanes = race(world, budget=5.0)
    assert winner(lanes, "a").name == "b"
    assert lane(lanes, "a").samples == pytest.approx([0.2] * len(lane(lanes, "a").samples))
    assert 60 < world.now <= 60 + 5.0 + 2.0


def test_one_that_compiles_is_not_held_against_one_that_had_compiled() -> None:
    """Only its second step says whether it is hopeless; who compiles nothing gets none."""

    def compiles(call: int) -> float:
        world.compilations += call == 0
        return 60.0 if call == 0 else 0.1

    world = World({"warm": 0.2, "compiles": compiles})
    assert winner(race(world), preferred="warm").name == "compiles"
    world = World({"warm": 0.2, "slow": lambda call: 60.0})
    assert winner(race(world), preferred="warm").name == "warm"
    assert world.calls["slow"] == 1


def test_compilations_are_counted() -> None:
    """By a graph that Dynamo makes, and not by one that it has."""
    function = torch.compile(lambda x: x + 1, backend="eager")
    before = frames_compiled()
    function(torch.ones(2))
    after = frames_compiled()
    function(torch.ones(2))
    assert before < after == frames_compiled()


def test_the_clearly_slower_stop_early() -> None:
    """1.5 x slower stops early, so that the close ones get the rounds."""
    world = World({"fp32": 0.010, "bf16": 0.0103, "fp16": 0.030})
    lanes = race(world)
    assert lane(lanes, "fp16").stopped
    assert len(lane(lanes, "bf16").samples) > 5 * len(lane(lanes, "fp16").samples)


def test_two_disturbed_rounds_stop_nobody() -> None:
    """Where steps are long, a fast candidate may be disturbed in both of its first rounds."""
    disturbed: dict[str, float | Callable[[int], float]] = {
        "fast": lambda call: 0.5 if 3 <= call <= 5 else 0.1,
        "other": 0.2,
    }
    assert winner(race(World(disturbed)), preferred="other").name == "fast"


def test_three_rounds_are_made_whatever_the_budget() -> None:
    """Two close candidates whose steps take longer than the budget are still compared."""
    world = World({"fp32": 2.0, "bf16": 1.9})
    lanes = race(world, budget=0.5)
    assert [len(one.samples) for one in lanes] == [3, 3]


def test_the_budget_is_kept() -> None:
    """Cheap steps fill the budget, and go over it by one round at most."""
    world = World({"fp32": 0.01, "bf16": 0.01})
    race(world, budget=3.0)
    assert 2.9 < world.now < 3.2


def test_short_steps_are_repeated_within_a_sample() -> None:
    """A step of 20 us is timed 250 at a time, and the sample is the time of one."""
    world = World({"fp32": 20e-6})
    lanes = race(world)
    assert lanes[0].repeats == 250
    assert lanes[0].samples == pytest.approx([20e-6] * 3)


def test_each_candidate_starts_from_the_same_state() -> None:
    """The state is put back before each trial, and again in long races."""
    world = World({"fp32": 0.01, "bf16": 0.01})
    race(world, budget=20.0)
    firsts = [name for name, since in world.starts if since == 0]
    assert firsts[:2] == ["fp32", "bf16"]
    assert max(since for _, since in world.starts) < 2 * 64 + 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_drops_the_candidate(bad: float) -> None:
    """However fast it is."""
    world = World({"fp32": 0.02, "fp16": 0.01})
    world.results["fp16"] = bad
    lanes = race(world)
    assert lane(lanes, "fp16").dropped == f"its loss is {bad}"
    assert winner(lanes, "fp16").name == "fp32"


def test_a_loss_that_turns_bad_later_drops_the_candidate() -> None:
    """In the rounds as well; nobody else starts from what it left."""
    world = World({"fp32": 0.02, "fp16": 0.01})
    world.results["fp16"] = lambda world: math.nan if world.calls["fp16"] > 20 else 1.0
    lanes = race(world)
    assert lane(lanes, "fp16").dropped == "its loss is nan"
    assert winner(lanes, "fp16").name == "fp32"


def test_a_loss_that_is_off_drops_the_candidate() -> None:
    """By more than rtol; within it, or without rtol, the candidate stays."""
    world = World({"fp32": 0.02, "bf16": 0.01})
    world.results |= {"fp32": 2.0, "bf16": 2.2}
    assert "its loss of step 1 is 0.1 off the reference's (rtol=0.05)" in (
        lane(race(world), "bf16").dropped
    )
    assert winner(race(world, rtol=0.2), "fp32").name == "bf16"
    assert winner(race(world, rtol=None), "fp32").name == "bf16"


def test_a_step_that_does_not_repeat_is_said_to_be_one() -> None:
    """Losses that move on with every call, as with a data iterator, are no matter of precision."""
    world = World({"fp32": 0.02, "bf16": 0.01})
    moving = lambda world: float(sum(world.calls.values()))  # noqa: E731
    world.results |= {"fp32": moving, "bf16": moving}
    assert "take the batch outside of step, or pass rtol=None" in lane(race(world), "bf16").dropped


def test_a_scaler_that_finds_its_scale_begins_again() -> None:
    """Steps that it skipped are no part of the comparison, which is then made in full."""
    world = World({"fp32": 0.02, "fp16": 0.01})
    world.results["fp32"] = lambda world: 1.0 / world.since_reset

    def skips_twice(world: World) -> float:
        if world.calls["fp16"] <= 2:
            world.skipped.update(["fp16"])
        return 1.0 / world.since_reset

    world.results["fp16"] = skips_twice
    lanes = race(world)
    assert [seen.loss for seen in lane(lanes, "fp16").seen if seen] == [1.0, 1 / 2, 1 / 3]
    assert winner(lanes, "fp32").name == "fp16"


def test_losses_after_a_skipped_step_are_not_compared() -> None:
    """Where every step is skipped: behind by an update, it is no less precise for that."""
    world = World({"fp32": 0.02, "fp16": 0.01})
    world.results["fp32"] = lambda world: 1.0 / world.since_reset
    world.results["fp16"] = lambda world: world.skipped.update(["fp16"]) or 1.0
    lanes = race(world)
    assert len(lane(lanes, "fp16").seen) == 1
    assert lane(lanes, "fp16").running


def test_a_step_that_raises_drops_the_candidate() -> None:
    """With the error's first line as the reason, and the error kept."""
    world = World({"fp32": 0.02, "fp16": 0.01})

    def fail(world: World) -> None:
        raise RuntimeError("not implemented for 'Half'\nmore")

    world.results["fp16"] = fail
    failed = lane(race(world), "fp16")
    assert failed.dropped == "RuntimeError: not implemented for 'Half'"
    assert isinstance(failed.error, RuntimeError)


@pytest.mark.parametrize("late", ["raises", "nan"])
def test_one_that_fails_in_the_rounds_is_dropped_alone(late: str) -> None:
    """Whoever stopped early because of it runs again, and may be chosen."""

    def fails(world: World) -> float:
        if world.now < 1.5:
            return 1.0
        if late == "raises":
            raise ValueError("out of luck")
        return math.nan

    world = World({"slow": 0.02, "slower": 0.05, "fast": 0.01, "near": 0.01})
    world.results.update({"fast": fails, "near": fails})
    lanes = race(world, budget=3.0)
    assert lane(lanes, "fast").dropped == (
        "ValueError: out of luck" if late == "raises" else "its loss is nan"
    )
    chosen = winner(lanes, preferred="fast")
    assert chosen.name == "slow"
    assert len(chosen.samples) >= 3


def test_an_interrupt_in_the_rounds_goes_on() -> None:
    """Ctrl-C is no fault of a candidate."""

    def interrupted(world: World) -> float:
        if world.calls["a"] > 10:
            raise KeyboardInterrupt
        return 1.0

    world = World({"a": 0.01, "b": 0.01})
    world.results["a"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        race(world)


def test_a_failed_step_frees_what_it_held() -> None:
    """After running out of memory the next candidate needs what the frames of the error hold."""
    import weakref

    world = World({"fp32": 0.02, "fp16": 0.01})
    held: list[Any] = []

    def fail(world: World) -> None:
        large = torch.ones(3)
        held.append(weakref.ref(large))
        raise RuntimeError("out of memory")

    world.results["fp32"] = fail
    lanes = race(world)
    assert held[0]() is None
    assert lane(lanes, "fp16").running


def test_ranks_go_by_the_slowest() -> None:
    """What is fast here and slow on another rank is slow, and what fails there fails here."""
    world = World({"fp32": 0.02, "bf16": 0.01, "fp16": 0.005})

    def together(value: Any) -> list[Any]:
        match value:
            case dict():  # a round: bf16 is slow on the other rank
                return [value, {n: (0.03 if n == "bf16" else 0.01, "") for n in value}]
            case (float() as seconds, str(), bool(), bool()):
                other = "its loss is nan" if world.calls["fp16"] else ""
                return [value, (seconds, other, False, False)]
            case _:
                return [value, value]

    lanes = race(world, together=together)
    assert lane(lanes, "fp16").dropped == "its loss is nan"
    assert winner(lanes, "bf16").name == "fp32"


def test_outputs_are_compared_where_the_reference_is_finite() -> None:
    """Masks of -inf are no fault; a NaN beside a number is one; so is another shape."""
    reference = see(torch.tensor([1.0, -math.inf, 2.0]))
    same, off = see(torch.tensor([1.0, -math.inf, 2.01])), see(torch.tensor([1.0, 0.0, 3.0]))
    broken, other = see(torch.tensor([math.nan, 0.0, 2.0])), see(torch.ones(2))
    assert compare([same], [reference], 0.05) == ""
    assert "output of step 1 is 0.45 off" in compare([off], [reference], 0.05)
    assert "not finite" in compare([broken], [reference], 0.05)
    assert "another shape" in compare([other], [reference], 0.05)


def test_a_loss_near_zero_is_no_trap() -> None:
    """Differences are held against the largest of the losses."""
    own = [see(1.0), see(1e-6)]
    assert compare(own, [see(1.0), see(0.0)], 0.05) == ""


@pytest.mark.parametrize("result", [None, torch.tensor([3, 1]), torch.ones(0)])
def test_what_says_nothing_is_not_compared(result: Any) -> None:
    """None, tokens and empty outputs."""
    assert see(result) is None


def test_large_outputs_are_sampled() -> None:
    """Evenly, and by no more than 65536 elements."""
    seen = see(torch.arange(200_000.0))
    assert isinstance(seen, Seen)
    assert 32768 < seen.values.numel() <= 65536
    assert seen.values[-1] > 199_990


@pytest.mark.parametrize("result", ["loss", {"loss": 1.0}, (torch.ones(1),)])
def test_a_result_of_another_type_is_an_error(result: Any) -> None:
    """At once: it is no fault of a candidate."""
    world = World({"fp32": 0.02})
    world.results["fp32"] = result
    with pytest.raises(ArgumentTypeError, match="step must return the loss"):
        race(world)
