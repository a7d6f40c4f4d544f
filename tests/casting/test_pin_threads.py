"""A pin changes nothing in the module: threads, copies and replicas see their own weights."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import amphal


def test_a_call_leaves_the_weights_in_place_for_others() -> None:
    """While a pinned module runs, its parameter is the float32 parameter that it was."""
    seen = []

    class Norm(torch.nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((self._parameters["weight"], "weight" in self.state_dict()))
            return super().forward(x)

    module = Norm(8)
    weight = module.weight
    amphal.set_precision(module, "lower_precision")
    with amphal.autocast("cpu", "bf16"):
        out = module(torch.randn(2, 8))
    assert out.dtype is torch.bfloat16
    assert seen[0][0] is weight
    assert weight.dtype is torch.float32


def test_threads_that_share_a_pinned_module_leave_it_as_it_was() -> None:
    """Four threads, many calls: the weight is the same parameter with the same values."""
    module = torch.nn.LayerNorm(16)
    weight, exact = module.weight, module.weight.detach().clone()
    amphal.set_precision(module, "lower_precision")
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            for _ in range(100):
                with amphal.autocast("cpu", "bf16"), torch.no_grad():
                    module(torch.ones(2, 16))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert module.weight is weight
    assert torch.equal(weight, exact)


@pytest.mark.parametrize("precision", ["fp32", "lower_precision"])
def test_copies_and_replicas_compute_with_their_own_weights(precision: str) -> None:
    """Zero weights give zero, in a shallow copy and in what DataParallel makes of a module."""
    module = torch.nn.Linear(8, 8)
    amphal.set_precision(module, precision)  # type: ignore[arg-type]
    shallow = copy.copy(module)
    shallow._parameters = {
        name: torch.nn.Parameter(torch.zeros_like(p))
        for name, p in module._parameters.items()
        if p is not None
    }
    replica = module._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(8, 8), torch.zeros(8)
    replica._former_parameters = {"weight": replica.weight, "bias": replica.bias}
    x = torch.randn(4, 8)
    with amphal.autocast("cpu", "bf16"):
        for other in (shallow, replica):
            assert other(x).count_nonzero() == 0
        assert module(x).count_nonzero() > 0


def test_gradients_of_cast_weights_reach_the_parameters() -> None:
    """The cast is part of the graph: the gradient of the sum of x @ w.T is the sum of x."""
    module = torch.nn.Linear(4, 4, bias=False)
    amphal.set_precision(module, "lower_precision")
    x = torch.ones(2, 4)
    with amphal.autocast("cpu", "bf16"):
        module(x).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype is torch.float32
    assert torch.equal(module.weight.grad, torch.full((4, 4), 2.0))


def test_a_recurrent_module_takes_its_cast_weights() -> None:
    """An LSTM keeps its weights in a list of its own, which is cast too."""
    module = torch.nn.LSTM(4, 4)
    amphal.set_precision(module, "lower_precision")
    with amphal.autocast("cpu", "bf16"):
        out, _ = module(torch.randn(3, 2, 4))
    assert out.dtype is torch.bfloat16
    assert all(p is not None and p.dtype is torch.float32 for p in module._flat_weights)
