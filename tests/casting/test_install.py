"""Autocast kernels for what has none: a device in pure Python, and third-party ops."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator

import pytest
import torch

import amphal
from amphal import op_lists, register_autocast_op
from amphal.contract.records import torch_version
from amphal.errors import ArgumentTypeError, OpPolicyError, UnknownDeviceError

LOW, FULL = torch.bfloat16, torch.float32
pytestmark = pytest.mark.filterwarnings("ignore::amphal.PrecisionWarning")

TOY = """
    import warnings
    warnings.simplefilter("ignore")
    import torch
    import torch.nn.functional as F
    from torch.utils._pytree import tree_map
    import amphal
    from amphal import Hardware, OpLists
    from amphal.contract import Availability, Backend, DtypeSupport, ScalerSupport

    torch.utils.rename_privateuse1_backend("toy")
    torch.utils.backend_registration._setup_privateuseone_for_python_backend("toy")
    LOW, FULL = torch.bfloat16, torch.float32

    class Toy(torch.Tensor):
        # Numbers on the CPU; to everybody else, a device of its own.
        @staticmethod
        def __new__(cls, raw):
            toy = torch.Tensor._make_wrapper_subclass(
                cls, raw.shape, dtype=raw.dtype, device="toy:0", strides=raw.stride()
            )
            toy.raw = raw
            return toy

        @classmethod
        def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
            def unwrap(v):
                if isinstance(v, Toy):
                    return v.raw
                return torch.device("cpu") if isinstance(v, torch.device) else v
            out = op(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
            return tree_map(lambda v: Toy(v) if isinstance(v, torch.Tensor) else v, out)

    device = torch.library.Library("aten", "IMPL")
    device.impl(
        "empty.memory_format",
        lambda size, dtype=None, **kwargs: Toy(torch.empty(size, dtype=dtype)),
        "PrivateUse1",
    )

    lists = OpLists(
        lower_precision=frozenset(["linear", "mm", "addmm"]),
        fp32=frozenset(["mse_loss"]),
        fp32_set_opt_dtype=frozenset(["softmax.int"]),
    )
    amphal.contract.register_backend(Backend(
        "toy", 50,
        available=lambda: Availability(True),
        probe=lambda index: Hardware("toy", "a toy"),
        dtypes=lambda hw: {LOW: DtypeSupport("native", True, "it is a toy")},
        op_lists=lambda dtype: lists,
        scaler=lambda hw: ScalerSupport(False, True, True, False),
    ))
    torch.set_autocast_enabled("toy", True)
    try:
        torch.relu(Toy(torch.ones(2)))
    except NotImplementedError:
        torch.set_autocast_enabled("toy", False)
    else:
        raise SystemExit("the toy device needs no kernels: the test shows nothing")
    assert amphal.op_lists("toy") == lists

    raw_x, raw_w, raw_t = torch.randn(2, 4), torch.randn(3, 4), torch.randn(2, 3)
    x, w, target = Toy(raw_x), Toy(raw_w.clone()).requires_grad_(), Toy(raw_t)
    with amphal.autocast("toy", dtype="bf16"):
        y = F.linear(x, w)
        assert y.dtype is LOW
        assert torch.relu(y).dtype is LOW
        assert F.softmax(y, -1).dtype is FULL
        loss = F.mse_loss(y, target)
        assert loss.dtype is FULL
        with amphal.autocast("toy", dtype="bf16", ops={"softmax": "as_is", "relu": "fp32"}):
            assert F.softmax(y, -1).dtype is LOW
            assert torch.relu(y).dtype is FULL

    by_hand = raw_w.clone().requires_grad_()
    low = F.linear(raw_x.to(LOW), by_hand.to(LOW))
    F.mse_loss(low.float(), raw_t).backward()

    optimizer = torch.optim.SGD([w], lr=0.5)
    scaler = amphal.GradScaler("toy", init_scale=8.0, enabled=True)
    scaler.scale(loss).backward()
    assert torch.equal(w.grad.raw, by_hand.grad * 8)
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(w.detach().raw, raw_w - 0.5 * by_hand.grad)
    assert amphal.op_lists("toy") == lists
    print("cast as declared")
"""


@pytest.mark.skipif(
    torch_version() < (2, 10), reason="a device in pure Python came with torch 2.10"
)
def test_a_device_in_pure_python_gets_its_declared_lists() -> None:
    """Forward, backward and a scaler's step run on it as by hand; before, autocast raised."""
    code = textwrap.dedent(TOY)
    command, elsewhere = [sys.executable, "-c", code], tempfile.gettempdir()
    result = subprocess.run(command, capture_output=True, text=True, cwd=elsewhere)
    assert "cast as declared" in result.stdout, result.stdout + result.stderr


@pytest.fixture
def library() -> Iterator[str]:
    name = "amphal_test"
    lib = torch.library.Library(name, "DEF")
    lib.define("mix(Tensor a, Tensor b) -> Tensor")
    lib.impl("mix", lambda a, b: a + b, "CompositeImplicitAutograd")
    lib.define("fused(Tensor a, Tensor[] rest, float scale=1.0) -> Tensor")
    lib.impl("fused", lambda a, rest, scale=1.0: a * scale + sum(rest), "CompositeImplicitAutograd")
    yield name
    lib._destroy()


@pytest.mark.parametrize(
    ("policy", "dtypes"),
    [
        ("lower_precision", (LOW, LOW, LOW)),
        ("fp32", (FULL, FULL, FULL)),
        ("promote", (FULL, LOW, FULL)),
    ],
)
def test_a_third_party_op_is_cast(
    library: str, policy: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    """On every device, in the region's dtype, for lists of tensors too, until it is removed."""
    full, low = torch.randn(3), torch.randn(3).to(LOW)
    mix, fused = torch.ops.amphal_test.mix, torch.ops.amphal_test.fused
    rules = [register_autocast_op(f"{library}::mix", policy), register_autocast_op(fused, policy)]
    try:
        with amphal.autocast("cpu", dtype="bf16"):
            for op in (mix, lambda a, b: fused(a, [b, b], 2.0)):
                assert (
                    tuple(op(*pair).dtype for pair in ((full, full), (low, low), (low, full)))
                    == dtypes
                )
        for device in ("cuda", "xpu", "mps", "cpu"):
            assert op_lists(device).policy(f"{library}::mix") == policy
            assert op_lists(device).unclassified == frozenset()
        with amphal.autocast("cpu", dtype="fp16"):
            assert mix(full, full).dtype is (torch.float16 if policy == "lower_precision" else FULL)
        assert mix(full, low).dtype is FULL
    finally:
        for rule in rules:
            rule.remove()
    with amphal.autocast("cpu", dtype="bf16"):
        assert mix(full, full).dtype is FULL
    assert f"{library}::mix" not in op_lists("cuda")


@pytest.mark.fake
def test_a_third_party_op_is_cast_on_devices_that_are_not_here(library: str) -> None:
    """Observed on fake tensors, on the devices that were named and on no other."""
    from amphal.testing import observe_policy

    rule = register_autocast_op(f"{library}::mix", "fp32", device_types=["cuda", "xpu"])
    try:
        assert observe_policy("cuda", f"{library}::mix") == "fp32"
        assert observe_policy("xpu", f"{library}::mix") == "fp32"
        assert observe_policy("mps", f"{library}::mix") == "as_is"
    finally:
        rule.remove()
    assert observe_policy("cuda", f"{library}::mix") == "as_is"


def test_gradients_of_a_custom_op_flow_through_its_casts() -> None:
    """An op of torch.library.custom_op with its own backward is cast in front of it."""

    @torch.library.custom_op("amphal_test2::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_autograd(lambda ctx, grad: grad * 2)
    rule = register_autocast_op(double, "lower_precision", "cpu")
    try:
        x = torch.ones(3, requires_grad=True)
        with amphal.autocast("cpu", dtype="bf16"):
            y = double(x)
        assert y.dtype is LOW
        y.float().sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((3,), 2.0))
    finally:
        rule.remove()


def test_mistakes_are_told(library: str) -> None:
    """An unknown op or device, a senseless policy, and a second rule are errors."""
    with pytest.raises(OpPolicyError, match="no op"):
        register_autocast_op(f"{library}::nothing", "fp32")
    with pytest.raises(OpPolicyError, match="no policy"):
        register_autocast_op(f"{library}::mix", "fp23")
    with pytest.raises(UnknownDeviceError):
        register_autocast_op(f"{library}::mix", "fp32", device_types="abacus")
    with pytest.raises(ArgumentTypeError):
        register_autocast_op(print, "fp32")
    with pytest.raises(OpPolicyError, match="ops="):
        register_autocast_op("linear", "fp32", device_types="cpu")
    rule = register_autocast_op(f"{library}::mix", "fp32")
    with pytest.raises(OpPolicyError, match="remove"):
        register_autocast_op(f"{library}::mix", "promote")
    rule.remove()
    rule.remove()
