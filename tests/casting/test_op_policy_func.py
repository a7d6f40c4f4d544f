"""Casting policies in the transforms of torch.func: right values, or a clear error."""

from __future__ import annotations

import pytest
import torch

import amphal
from amphal.errors import OpPolicyError

# 1 + 2**-10 is not a bfloat16: a cast shows itself as exactly 1.
FINE = 1 + 2**-10
X = torch.full((2, 2), FINE)
ONE = torch.eye(2)


def product(x: torch.Tensor) -> torch.Tensor:
    return (x @ ONE).square().sum()


@pytest.mark.parametrize("policy", ["fp32", "as_is"])
@pytest.mark.parametrize("transform", ["grad", "jacrev", "jacfwd", "vmap_grad"])
def test_the_parts_of_a_composite_op_are_not_cast(policy: str, transform: str) -> None:
    """matmul is made of mm, which a bf16 region casts: under a policy the product is float32's."""

    def f(x: torch.Tensor) -> torch.Tensor:
        with amphal.autocast("cpu", "bf16", ops={"matmul": policy}):
            found = product(x)
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16
            assert torch.is_autocast_enabled("cpu")
        return found

    if transform == "vmap_grad":
        found = torch.func.vmap(torch.func.grad(f))(X[None])[0]
    else:
        found = getattr(torch.func, transform)(f)(X)
    assert torch.equal(found, torch.full((2, 2), 2 * FINE))


@pytest.mark.parametrize("policy", ["fp32", "as_is"])
def test_a_region_around_the_transform(policy: str) -> None:
    """The values are float32's; a gradient's own products follow the policy of ``mm``, as in a
    backward pass in a region.
    """
    with amphal.autocast("cpu", "bf16", ops={"matmul": policy}):
        value, slope = torch.func.jvp(product, (X,), (torch.ones(2, 2),))  # type: ignore[misc]
        assert value.item() == 4 * FINE**2
        assert slope.item() == 8 * FINE
        assert torch.func.vmap(product)(X[None]).item() == 4 * FINE**2
        assert torch.equal(torch.func.grad(product)(X), torch.full((2, 2), 2.0))
        assert torch.equal(torch.func.jacrev(product)(X), torch.full((2, 2), 2 * FINE))
    with amphal.autocast("cpu", "bf16", ops={"matmul": policy, "mm": policy}):
        assert torch.equal(torch.func.grad(product)(X), torch.full((2, 2), 2 * FINE))


def test_low_precision_of_a_composite_op_is_low() -> None:
    """The same product under lower_precision sees the rounded values: the gradient is 2."""
    with amphal.autocast("cpu", "bf16", ops={"matmul": "lower_precision"}):
        found = torch.func.grad(lambda x: (x @ ONE).float().square().sum())(X)
    assert torch.equal(found, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("op", ["mul", "add"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_number_in_grad_is_refused(op: str, inside: bool) -> None:
    """torch hands no wrapped Python number to a kernel in Python; the error says what to do."""
    region = amphal.autocast("cpu", "bf16", ops={op: "fp32"})

    def f(x: torch.Tensor) -> torch.Tensor:
        if inside:
            with region:
                return getattr(torch, op)(x, 2).sum()
        return getattr(torch, op)(x, 2).sum()

    with pytest.raises(OpPolicyError, match=r"torch\.tensor\(2\.0\)") as caught:
        if inside:
            torch.func.grad(f)(X)
        else:
            with region:
                torch.func.grad(f)(X)
    assert op in str(caught.value)
    assert not torch.is_autocast_enabled("cpu")


def test_a_number_as_a_tensor_is_right_in_grad() -> None:
    """What the error proposes works: d(2x)/dx is 2, and outside of transforms numbers work too."""
    with amphal.autocast("cpu", "bf16", ops={"mul": "fp32"}):
        two = torch.tensor(2.0)
        assert torch.equal(torch.func.grad(lambda x: (x * two).sum())(X), torch.full((2, 2), 2.0))
        assert torch.equal(X * 2, torch.full((2, 2), 2 * FINE))


def test_other_errors_pass_through() -> None:
    """A RuntimeError of the program's own stays what it is."""
    with pytest.raises(RuntimeError, match=r"^mine$") as caught:
        with amphal.autocast("cpu", "bf16", ops={"mul": "fp32"}):
            raise RuntimeError("mine")
    assert type(caught.value) is RuntimeError
