"""Data-parallel and sharded training in real fp16: what N ranks do is what one process does."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from helpers.ranks import Ranks
from helpers.training import Course, overflows, run

# On a small machine four ranks share the cores, so they take fewer steps unless told otherwise.
STEPS = {2: 200, 4: int(os.environ.get("AMPHAL_TEST_STEPS", "30"))}
FEWER = 50
TOLERANCE = 0.005  # of losses near 1: the same fp16 sums, in another order


@functools.cache
def alone(size: int, steps: int) -> Course:
    """What a single process comes to, with overflows at the steps that ``size`` ranks have them."""
    return run("one process", 1, steps, overflows(steps, size))


def check(ranks: Ranks, kind: str, where: str, group: bool, steps: int) -> None:
    """Train with overflows on random ranks, and compare the ranks and a single process."""
    planted = overflows(steps, ranks.size)
    assert len(set(planted.values())) > 1
    train = functools.partial(run, where=where, group=group)
    courses = ranks(train, kind, ranks.size, steps, planted)
    assert courses[0].skips == sorted(planted)
    assert courses[0].losses[-1] < courses[0].losses[0]
    compare(courses, alone(ranks.size, steps))


def compare(courses: list[Course], single: Course) -> None:
    first = courses[0]
    for course in courses[1:]:
        assert course.skips == first.skips
        assert course.scales == first.scales
        assert course.losses == first.losses
        assert course.state == first.state
        for name, weight in first.weights.items():
            assert torch.equal(course.weights[name], weight), name
    assert first.skips == single.skips
    assert first.scales == single.scales
    assert first.losses == pytest.approx(single.losses, abs=TOLERANCE)
    assert all(weight.isfinite().all() for weight in first.weights.values())


WAYS = [
    ("ddp", "loss", False),  # the reduction of the gradients carries an inf to every rank
    ("ddp", "gradient", True),
    ("fsdp2", "loss", False),
    ("fsdp2", "gradient", False),  # sharded gradients know their ranks
]


@pytest.mark.parametrize(("kind", "where", "group"), WAYS)
def test_two_ranks_are_as_one_process(two_ranks: Ranks, kind: str, where: str, group: bool) -> None:
    """200 fp16 steps with overflows on random ranks: equal weights, skips, scales and losses."""
    check(two_ranks, kind, where, group, STEPS[2])


@pytest.mark.parametrize(("kind", "where", "group"), WAYS)
def test_four_ranks_are_as_one_process(
    four_ranks: Ranks, kind: str, where: str, group: bool
) -> None:
    """The same on four ranks."""
    check(four_ranks, kind, where, group, STEPS[4])


@pytest.mark.parametrize(
    ("kind", "where", "group"),
    [
        ("fsdp2", "gradient", True),
        ("fsdp1", "loss", True),
        ("fsdp1", "gradient", True),
        ("tensor parallel", "gradient", True),
        ("sequence parallel", "gradient", True),
        ("sequence parallel", "gradient", False),
    ],
)
def test_other_ways_are_as_one_process(
    two_ranks: Ranks, kind: str, where: str, group: bool
) -> None:
    """FSDP1, tensor and sequence parallel, with overflows that only one rank's shard has."""
    check(two_ranks, kind, where, group, FEWER)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("ddp", "sgd"),
        ("ddp", "fused"),
        ("fsdp2", "sgd"),
        ("fsdp2", "fused"),
        ("tensor parallel", "sgd"),  # torch's fused optimizers refuse DTensors beside plain tensors
        ("sequence parallel", "sgd"),
        ("sequence parallel", "fused"),
    ],
)
def test_clips_by_the_norm_of_the_whole_model(two_ranks: Ranks, kind: str, optimizer: str) -> None:
    """``scaler.clip_grad_norm_`` gives the norm over all shards, which one process would have."""
    clip = functools.partial(run, clip=0.1, optimizer=optimizer)
    courses = two_ranks(clip, kind, 2, 5, {})
    single = run("one process", 1, 5, {}, clip=0.1, optimizer=optimizer)
    for course in courses:
        assert course.norms == pytest.approx(single.norms, rel=0.02)
        assert course.losses == pytest.approx(single.losses, rel=0.02)
    assert min(single.norms) > 0.1  # so that every step was clipped
