"""``amphal.op_lists`` and ``OpLists``: reading, comparing and editing casting policies."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from amphal import OpLists, op_lists
from amphal.errors import ArgumentError, ArgumentTypeError, OpPolicyError, UnknownDeviceError


def test_the_lists_answer_for_a_device_that_is_not_here() -> None:
    """softmax is float32 on a GPU and runs in its input's dtype on the CPU."""
    assert op_lists("cuda").policy("softmax") == "fp32_set_opt_dtype"
    assert op_lists("cpu").policy("softmax") == "as_is"
    assert op_lists("mps:0").policy("softmax.int") == "fp32"
    assert op_lists(torch.device("xpu")).policy("linear") == "lower_precision"


def test_every_op_has_one_policy() -> None:
    """Iterating gives each op once, and the length counts them."""
    lists = op_lists("cuda")
    ops = [op for op, _ in lists]
    assert len(ops) == len(set(ops)) == len(lists)
    assert "softmax.int" in lists
    assert "softmax" not in lists


def test_names_that_this_torch_lacks_are_dropped() -> None:
    """Every name in the lists is an op that can be called here."""
    for op, _ in (*op_lists("cuda"), *op_lists("mps"), *op_lists("cpu")):
        namespace, _, name = op.rpartition("::")
        packet = getattr(getattr(torch.ops, namespace or "aten"), name.split(".")[0])
        assert name.partition(".")[2] or "default" in packet.overloads()


def test_diff_names_both_policies_and_prints_as_a_table() -> None:
    """A difference is op to (mine, theirs), and equal lists have none."""
    diff = op_lists("cpu").diff(op_lists("cuda"))
    assert diff["softmax.int"] == ("as_is", "fp32_set_opt_dtype")
    assert diff["binary_cross_entropy"] == ("fp32", "banned")
    assert "linear" not in diff
    assert any(line.split() == ["exp", "as_is", "fp32"] for line in repr(diff).splitlines())
    assert op_lists("cpu").diff(op_lists("cpu")) == {}
    assert repr(op_lists("cpu").diff(op_lists("cpu"))) == "OpDiff(no difference)"


def test_replace_gives_other_lists_and_leaves_these_alone() -> None:
    """A bare name means all overloads; as_is takes an op off the lists."""
    cuda = op_lists("cuda")
    edited = cuda.replace(softmax="lower_precision", layer_norm="as_is")
    assert edited.policy("softmax") == "lower_precision"
    assert edited.policy("layer_norm") == "as_is"
    assert cuda.policy("layer_norm") == "fp32"
    assert set(cuda.diff(edited)) == {
        "layer_norm",
        *(o for o, _ in cuda if o.startswith("softmax")),
    }
    assert cuda.replace({"pow.Scalar": "as_is"}).diff(cuda) == {"pow.Scalar": ("as_is", "fp32")}
    assert cuda.replace({}) == cuda


def test_equal_lists_are_equal_and_hash_alike() -> None:
    """Lists are values: equality is by content, and they can be dictionary keys and pickled."""
    assert op_lists("cuda") == op_lists("cuda", "fp16")
    assert hash(op_lists("cuda")) == hash(op_lists("cuda"))
    assert op_lists("cuda") != op_lists("xpu")
    assert pickle.loads(pickle.dumps(op_lists("mps"))) == op_lists("mps")


def test_they_can_be_read_by_people_and_programs() -> None:
    """repr counts, str lists every op, and to_dict is JSON that builds the same lists."""
    lists = op_lists("cpu")
    assert repr(lists).startswith("<OpLists: ")
    assert f"{len(lists.lower_precision)} lower_precision" in repr(lists)
    assert "unclassified" not in repr(lists)
    assert "linear" in str(lists)
    loaded = json.loads(json.dumps(lists.to_dict()))
    assert OpLists(**{name: frozenset(ops) for name, ops in loaded.items()}) == lists


def test_an_unknown_op_is_told_with_near_names() -> None:
    """A misspelt op, overload or policy is an error that offers what may have been meant."""
    with pytest.raises(OpPolicyError, match="'softmax'"):
        op_lists("cuda").policy("sofmax")
    with pytest.raises(OpPolicyError, match=r"softmax\.int"):
        op_lists("cuda").replace({"softmax.integer": "fp32"})
    with pytest.raises(OpPolicyError, match="'lower_precision'"):
        op_lists("cuda").replace(softmax="lower_precison")
    with pytest.raises(OpPolicyError, match=r"pow\.Scalar: as_is|pow\.Scalar: promote"):
        op_lists("cuda").replace({"pow.Scalar": "as_is", "pow.Tensor_Tensor": "promote"}).add(
            promote=["pow.Scalar"]
        ).policy("pow")


def test_an_op_has_no_two_policies() -> None:
    """Building lists in which an op appears twice is an error."""
    with pytest.raises(ArgumentError, match="both"):
        OpLists(fp32=frozenset(["exp"]), promote=frozenset(["exp"]))
    with pytest.raises(ArgumentTypeError, match="string"):
        OpLists(fp32="exp")  # type: ignore[arg-type]


def test_an_unknown_device_is_an_error() -> None:
    """A device type without a backend is refused."""
    with pytest.raises(UnknownDeviceError):
        op_lists("abacus")
