"""Train one small encoder on the CPU under the CPU's casting policy and under CUDA's.

    python examples/op_policy.py [--steps 50]

A GPU runs softmax, layer norm and losses in float32 where the CPU's autocast leaves them in
bfloat16 and the other way round, so a model that behaves on a laptop may not on a GPU. With
``ops=amphal.op_lists("cuda")`` the CPU makes the GPU's casts, with real numbers and a debugger. The
example trains both ways from the same weights, prints both losses, and the ops that ran in another
dtype.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amphal

LENGTH, WIDTH, SYMBOLS = 6, 16, 4


class Encoder(nn.Module):
    """Says of each symbol of a sequence whether it is the same as the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout=0.0, activation=F.softplus, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, 2)
        )

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(symbols) + self.position))


class Dtypes(TorchDispatchMode):
    """Notes the result's dtype of every op that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[str]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, torch.Tensor) and first.is_floating_point():
            name = op.name().removeprefix("aten::")
            self.found.setdefault(name, set()).add(str(first.dtype).removeprefix("torch."))
        return out


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    symbols = torch.randint(SYMBOLS, (32, LENGTH), generator=generator)
    return symbols, (symbols == symbols[:, :1]).long()


def train(policy: amphal.OpLists, steps: int) -> tuple[list[float], dict[str, set[str]]]:
    """The losses of all steps, and the dtypes of the results of the first forward pass's ops."""
    torch.manual_seed(0)
    model, data = Encoder(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses, dtypes = [], Dtypes()
    for step in range(steps):
        symbols, same = batch(data)
        with amphal.autocast("cpu", dtype="bf16", ops=policy):
            if step == 0:
                with dtypes:
                    loss = F.cross_entropy(model(symbols).flatten(0, 1), same.flatten())
            else:
                loss = F.cross_entropy(model(symbols).flatten(0, 1), same.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dtypes.found


def show(console: Console, cpu: dict[str, set[str]], cuda: dict[str, set[str]]) -> int:
    """Print the ops that ran in another dtype, and return how many."""
    table = Table(title="Ops that ran differently", title_justify="left")
    for column in ("op", "under the CPU's policy", "under CUDA's policy"):
        table.add_column(column)
    different = [op for op in sorted({*cpu, *cuda}) if cpu.get(op) != cuda.get(op)]
    for op in different:
        table.add_row(op, *(", ".join(sorted(d.get(op, ()))) or "did not run" for d in (cpu, cuda)))
    console.print(table)
    return len(different)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args(arguments).steps
    warnings.simplefilter("ignore", amphal.PrecisionWarning)
    torch.set_num_threads(1)
    console = Console()
    (cpu_losses, cpu_ops), (cuda_losses, cuda_ops) = (
        train(amphal.op_lists(device), steps) for device in ("cpu", "cuda")
    )
    for name, losses in (("the CPU's", cpu_losses), ("CUDA's", cuda_losses)):
        last = sum(losses[-5:]) / len(losses[-5:])
        console.print(f"{steps} steps under {name} policy: loss {losses[0]:.3f} to {last:.3f}")
    different = show(console, cpu_ops, cuda_ops)
    return {"cpu": cpu_losses, "cuda": cuda_losses, "different": different}


if __name__ == "__main__":
    main()
