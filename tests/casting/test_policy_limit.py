"""There is no limit to the number of casting policies, and what is kept of them is bounded."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
import torch._dynamo.testing

import amphal
from amphal._autocast import policy_region
from amphal._casting import policy as policies

OPS = ("softmax", "layer_norm", "silu", "gelu", "exp", "log")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """A small bound, so that policies are forgotten often."""
    monkeypatch.setattr(policies, "MOST_KEPT", 8)
    policies._lists_changed()
    policies._known_marks.clear()
    policy_region._made.clear()
    policy_region._by_arguments.clear()
    return 8


def test_policies_that_nobody_is_in_are_forgotten(few: int) -> None:
    """64 policies in turn: never more than the bound is kept, and each does what it says."""
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    for choice in itertools.product(("fp32", "as_is"), repeat=len(OPS)):
        ops = dict(zip(OPS, choice, strict=True))
        with amphal.autocast("cpu", "bf16", ops=ops):
            expected = torch.float32 if ops["exp"] == "fp32" else torch.bfloat16
            assert torch.exp(x).dtype is expected
        assert len(policies._effectives) <= few
        assert len(policies._known_marks) <= few
        assert len(policies._policies) <= few + 1


def test_an_outer_policy_stays_in_force_while_others_are_forgotten(few: int) -> None:
    """Many inner policies come and go; the outer one holds within them and after them."""
    x = torch.randn(4, dtype=torch.bfloat16)
    with amphal.autocast("cpu", "bf16", ops={"tanh": "fp32"}):
        marks = policies._thread.active.marks  # type: ignore[union-attr]
        for choice in itertools.product(("fp32", "lower_precision"), repeat=5):
            with amphal.autocast("cpu", "bf16", ops=dict(zip(OPS, choice, strict=False))):
                assert torch.tanh(x).dtype is torch.float32
                assert policies._thread.active.marks != marks  # type: ignore[union-attr]
        assert torch.tanh(x).dtype is torch.float32
    assert torch.tanh(x).dtype is torch.bfloat16


def test_a_graph_of_a_forgotten_policy_is_not_used_for_another(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one mark for all policies, each compiled call still follows its own policy."""
    monkeypatch.setattr(policies, "MOST_KEPT", 1)
    x = torch.randn(4, dtype=torch.bfloat16)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.exp(x), torch.tanh(x)

    monkeypatch.setattr(policies, "_marks", lambda changes: _one_mark(changes))
    for exp, tanh in itertools.product(("fp32", "lower_precision"), repeat=2):
        with amphal.autocast("cpu", "bf16", ops={"exp": exp, "tanh": tanh, "log": "fp32"}):
            found = function(x)
        dtypes = {"fp32": torch.float32, "lower_precision": torch.bfloat16}
        assert [t.dtype for t in found] == [dtypes[exp], dtypes[tanh]]


def _one_mark(changes: frozenset[object]) -> policies.Marks:
    policies._known_marks[changes] = (("ipu", torch.int8), ("maia", torch.int8))
    return policies._known_marks[changes]


def many(number: int) -> list[dict[str, str]]:
    """Different policies, none of which names tanh."""
    policies = itertools.product(("fp32", "lower_precision", "as_is"), repeat=len(OPS))
    return [dict(zip(OPS, policy, strict=True)) for policy in itertools.islice(policies, number)]


def test_regions_that_nobody_keeps_are_freed(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 regions made and never entered: few are left, and one that is held works."""
    monkeypatch.setattr(policy_region, "_MOST", few)
    x = torch.randn(4, dtype=torch.bfloat16)
    kept = amphal.autocast("cpu", "bf16", ops={"tanh": "fp32"})
    others = [weakref.ref(amphal.autocast("cpu", "bf16", ops=ops)) for ops in many(100)]
    gc.collect()
    assert sum(ref() is not None for ref in others) <= 2 * few
    assert len(policy_region._made) <= few
    assert len(policy_region._by_arguments) <= few
    assert len(policies._policies) <= few
    with kept:
        assert torch.tanh(x).dtype is torch.float32
    again = amphal.autocast("cpu", "bf16", ops={"tanh": "fp32"})
    assert again is not kept
    with again, kept:
        assert torch.tanh(x).dtype is torch.float32
    assert torch.tanh(x).dtype is torch.bfloat16


def test_a_graph_keeps_the_region_that_was_made_in_it(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled function makes its region once; it still has it when all others are forgotten."""
    monkeypatch.setattr(policy_region, "_MOST", few)
    x = torch.randn(4, dtype=torch.bfloat16)
    # This backend calls the region at each run; others have its casts in their graph.
    traces = torch._dynamo.testing.CompileCounterWithBackend("eager")

    @torch.compile(backend=traces, fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        with amphal.autocast("cpu", "bf16", ops={"tanh": "fp32"}):
            return torch.tanh(x)

    assert function(x).dtype is torch.float32
    for ops in many(3 * few):
        amphal.autocast("cpu", "bf16", ops=ops)
    gc.collect()
    assert function(x).dtype is torch.float32
    assert traces.frame_count == 1


def test_entering_one_policy_within_many_is_bounded(few: int) -> None:
    """The outermost record of each policy and those within another are bounded by themselves."""
    outer = amphal.autocast("cpu", "bf16", ops={"tanh": "fp32"})
    for _ in range(3 * few):
        with outer:
            for ops in many(3):
                for made in (policies._policies, policy_region._made, policy_region._by_arguments):
                    made.clear()  # so that an equal policy is another object
                with amphal.autocast("cpu", "bf16", ops=ops):
                    pass
                within = policies._thread.active.within  # type: ignore[union-attr]
                assert 0 < len(within) <= few
        with amphal.autocast("cpu", "bf16", ops={"exp": "fp32"}):
            assert len(policies._outermost) <= few
