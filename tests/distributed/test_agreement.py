"""``detect(process_group=...)``: one precision for all ranks, and who held it back."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks

import amphal
from amphal.errors import ArgumentError, ArgumentTypeError, UnsupportedPrecisionError


def plan_of(hardware: list[str], precision: list[str]) -> Any:
    """This rank's plan for hardware that is not here, or the error that it got."""
    rank = dist.get_rank()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", amphal.PrecisionWarning)
            described = amphal.known_hardware()[hardware[rank]].hardware
            return amphal.detect(
                described, precision=precision[rank], process_group=dist.group.WORLD
            )
    except amphal.AmphalError as exc:
        return exc


def plan_here(precision: dict[int, str]) -> Any:
    """This rank's plan for its own hardware, with its own environment; or the error."""
    os.environ["AMPHAL_PRECISION"] = precision.get(dist.get_rank(), "")
    amphal.detect.cache_clear()
    try:
        return amphal.detect(process_group=dist.group.WORLD)
    except amphal.AmphalError as exc:
        return exc
    finally:
        del os.environ["AMPHAL_PRECISION"]


@pytest.mark.parametrize(
    ("hardware", "dtype", "said"),
    [
        (["h100", "a100"], torch.bfloat16, "the 2 ranks agreed on bf16"),
        (["h100", "v100"], torch.float16, "rank 0 would take bf16 alone; no bf16 for all: rank 1"),
        (["t4", "h100"], torch.float16, "rank 1 would take bf16 alone; no bf16 for all: rank 0"),
        (["v100", "gtx-1080"], torch.float32, "rank 0 would take fp16 alone; no fp16 for all"),
        (["h100", "gtx-1080"], torch.float32, "no bf16 for all: rank 1 (NVIDIA GeForce GTX 1080"),
    ],
)
def test_takes_what_all_can_do(
    two_ranks: Ranks, hardware: list[str], dtype: torch.dtype, said: str
) -> None:
    """The precision is the best that every rank does well, and the reason names who lacks more."""
    plans = two_ranks(plan_of, hardware, ["auto", "auto"])
    for plan in plans:
        assert plan.dtype is dtype
        assert plan.use_scaler is (dtype is torch.float16)
        assert said in plan.reasons[-1]
    assert plans[0].reasons[-1] == plans[1].reasons[-1]
    assert [plan.hardware.name for plan in plans] == [
        amphal.known_hardware()[name].hardware.name for name in hardware
    ]


def test_named_precision_is_kept(two_ranks: Ranks) -> None:
    """A precision that the user names holds on all ranks that can do it, emulated or not."""
    for plan in two_ranks(plan_of, ["h100", "t4"], ["bf16", "bf16"]):
        assert plan.dtype is torch.bfloat16
        assert not plan.use_scaler


def test_impossible_on_one_rank_is_an_error_on_all(two_ranks: Ranks) -> None:
    """A rank that cannot do what was named tells the others, and nobody waits for it."""
    for error in two_ranks(plan_of, ["h100", "rx-6800"], ["bf16", "bf16"]):
        assert type(error) is UnsupportedPrecisionError
        assert str(error).startswith("rank 1 of the process group: precision='bf16' asks for bf16")


def test_different_wishes_are_an_error_on_all(two_ranks: Ranks) -> None:
    """An environment variable that is set on one rank only is named, with the ranks."""
    for error in two_ranks(plan_here, {1: "bf16"}):
        assert type(error) is ArgumentError
        assert "'auto' on rank 0; 'bf16' on rank 1" in str(error)


def test_a_bad_argument_on_one_rank_is_an_error_on_all(two_ranks: Ranks) -> None:
    """A rank whose own question is wrong raises, and so do the others."""
    for error in two_ranks(plan_of, ["h100", "h100"], ["auto", "fp8"]):
        assert type(error) is UnsupportedPrecisionError
        assert str(error).startswith("rank 1 of the process group: precision must be")


def test_same_machine_agrees_with_itself(two_ranks: Ranks) -> None:
    """Ranks on one machine agree on what it would take alone."""
    for plan in two_ranks(plan_here, {}):
        assert plan.dtype is amphal.detect().dtype
        assert plan.reasons[-1].startswith("the 2 ranks agreed on")


@pytest.mark.parametrize("group", ["gloo", 1, object()])
def test_group_that_is_none(group: object) -> None:
    """Anything but a process group is refused before anything is asked of it."""
    with pytest.raises(ArgumentTypeError, match="init_process_group"):
        amphal.detect(process_group=group)


def detect_in_destroyed() -> str:
    import torch.distributed as dist

    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    with pytest.raises(ArgumentTypeError) as caught:
        amphal.detect("cpu", process_group=group)
    return str(caught.value)


def test_destroyed_group(two_ranks: Ranks) -> None:
    """A group that was destroyed is none that this process is in."""
    for message in two_ranks(detect_in_destroyed):
        assert "that this process is in" in message
