"""``amphal.trace``: what autocast did, op by op."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amphal
from amphal.errors import ArgumentTypeError, UnknownDeviceError

LOW = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def test_the_trace_of_a_transformer_agrees_with_the_op_lists() -> None:
    """Every call of a listed op, forward, has the dtypes that its policy gives."""
    model = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 32)
    with amphal.trace() as trace:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x, x).float().pow(2).mean()
        loss.backward()
    lists = dict(amphal.op_lists("cpu", torch.bfloat16))
    listed = [row for row in trace.rows if row.policy and row.phase == "forward"]
    assert {row.op for row in listed} >= {"linear", "scaled_dot_product_attention"}
    for row in listed:
        assert row.policy == lists.get(row.op, "pass_by")
        if row.policy == "lower_precision":
            assert set(row.outputs) == {"bf16"}
        elif row.policy == "fp32":
            assert set(row.outputs) == {"fp32"}
    backward = [row for row in trace.rows if row.phase == "backward"]
    assert any(row.op == "mm" and row.outputs == ("bf16",) for row in backward)
    assert all(row.module.startswith("Transformer") for row in backward if row.op == "mm")
    assert trace.casts == sum(row.casts for row in trace.rows)
    assert trace.cast_bytes == sum(row.cast_bytes for row in trace.rows)


def test_casts_are_counted_for_the_op_that_needs_them() -> None:
    """A linear layer of 4 x 8 in fp32: input, weight and bias are cast, 2 bytes an element."""
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    with amphal.trace() as trace, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(x)
    (row,) = trace.rows
    assert (row.op, row.policy, row.module) == ("linear", "lower_precision", "Linear")
    assert (row.inputs, row.outputs) == (("fp32",) * 3, ("bf16",))
    assert (row.count, row.casts, row.cast_bytes) == (1, 3, 2 * (3 * 8 + 4 * 8 + 4))
    assert re.search(r"test_trace\.py:\d+$", row.line)


def test_a_weight_that_is_cast_again_is_named() -> None:
    """Two regions cast the weight twice; one region keeps its cast."""
    layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    with amphal.trace() as trace:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                layer(x), layer(x)
    assert trace.cast_again == {"Linear.weight to bf16": 2}


def test_compare_marks_what_another_device_would_do() -> None:
    """softmax is raised on CUDA and passed by here; a banned op is marked."""
    with amphal.trace(compare="cuda") as trace, torch.autocast("cpu", torch.bfloat16):
        F.softmax(torch.ones(2, 2, dtype=torch.bfloat16), -1)
        F.binary_cross_entropy(torch.full((2,), 0.5), torch.ones(2))
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    elsewhere = {row.op: (row.policy, row.elsewhere) for row in trace.rows if row.policy}
    assert elsewhere["softmax.int"] == ("pass_by", "fp32_set_opt_dtype")
    assert elsewhere["binary_cross_entropy"] == ("fp32", "banned")
    assert elsewhere["mm"] == ("lower_precision", "")


def test_values_count_what_a_cast_loses() -> None:
    """1e-8 is zero in fp16, 65504 its limit; nothing else is."""
    x = torch.tensor([[1e-8, 0.0, 65504.0, 1.0]])
    with amphal.trace(values=True) as trace, torch.autocast("cpu", torch.float16):
        torch.mm(x, torch.eye(4))
    (row,) = [row for row in trace.rows if row.op == "mm"]
    assert row.values is not None
    seen = row.to_dict()["values"]
    assert seen["largest"] == 65504.0
    assert (seen["zeros"], seen["at_limit"]) == (0.5, 0.25)
    assert (seen["infinite"], seen["nan"]) == (0, 0)
    assert (row.flushed, row.cast_elements) == (1, 20)  # of both inputs


def test_the_result_is_what_it_is_without_a_trace() -> None:
    """Bit for bit, loss and gradients, also with a policy of the region's own."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)), torch.randn(4, 8)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        with amphal.autocast("cpu", "bf16", ops={"layer_norm": "lower_precision"}):
            loss = model(x).sum()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    plain = step()
    with amphal.trace() as trace:
        traced = step()
    assert len(plain) == 7
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    (norm,) = [row for row in trace.rows if row.op == "layer_norm"]
    assert norm.policy == "lower_precision"


def test_nothing_is_left_behind_when_the_block_raises() -> None:
    """No hook, no kernel that records, no mode."""
    with pytest.raises(KeyError), amphal.trace() as trace:
        raise KeyError
    with torch.autocast("cpu", torch.bfloat16):
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert not trace.rows
    assert not torch.nn.modules.module._global_forward_hooks


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls beyond the last row are counted together, and the trace says so."""
    monkeypatch.setattr("amphal._trace.rows.MOST_ROWS", 2)
    x = torch.ones(1)
    with amphal.trace() as trace:
        for op in (torch.exp, torch.log, torch.sin, torch.cos):
            op(x)
    assert [row.count for row in trace.rows] == [1, 1, 2]
    assert trace.to_dict()["truncated"]


def test_what_a_person_and_a_program_read(tmp_path: Path) -> None:
    """The table names op, place and casts; the page holds exactly to_dict()."""
    with amphal.trace(compare="cuda") as trace, torch.autocast("cpu", torch.bfloat16):
        nn.Sequential(nn.Linear(4, 4))(torch.ones(1, 4))
    table = trace.table()
    assert "linear" in table
    assert "Sequential.0" in table
    assert "3 casts" in table
    page = trace.to_html(tmp_path / "trace.html").read_text(encoding="utf-8")
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert held is not None
    assert json.loads(held[1]) == json.loads(json.dumps(trace.to_dict()))
    assert "http" not in page.replace(held[0], "")


def test_wrong_arguments_are_refused() -> None:
    """Before anything is recorded."""
    with pytest.raises(ArgumentTypeError, match="got 1"):
        amphal.trace(values=1).__enter__()  # type: ignore[arg-type]
    with pytest.raises(UnknownDeviceError, match="cudda"):
        amphal.trace(compare="cudda").__enter__()
