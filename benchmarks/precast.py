"""What ``amphal.precast_`` gains over ``torch.autocast`` alone, and that the outputs are the same.

    python benchmarks/precast.py [--device cpu] [--rounds 40] [--json PATH] [--check]

An encoder without gradients and the training of adapters on a frozen stack, each beside the same
under torch.autocast, by turns. Then a table of architectures: outputs compared bit for bit, bytes
saved. The architectures want the extra: pip install -e ".[bench]".
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from _architectures import TIMM, TORCH_ONLY, TRANSFORMERS, Block
from _timing import Times, in_turn, median, ratio, waiter
from torch import Tensor, nn

import amphal

WIDTH, HEADS, LAYERS = 768, 12, 4
ENCODER = {1: 2.0, 8: 2.0, 32: 1.7, 128: 1.3}
"""Tokens, and how many times faster at least."""
LORA = {32: 1.4, 128: 1.1}


def encoder(stock: bool) -> nn.Module:
    """torch's own encoder, whose layers take a fused kernel in eval mode, or one without."""
    torch.manual_seed(0)
    if stock:
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=True
        )
        model: nn.Module = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    else:
        model = nn.Sequential(*(Block(WIDTH, HEADS, causal=False) for _ in range(LAYERS)))
    return model.eval().requires_grad_(False)


class Adapter(nn.Module):
    """A frozen linear and what trains beside it: two matrices of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        low = nn.functional.linear(nn.functional.linear(x, self.a), self.b)
        return self.base(x) + 2 * low


def adapted() -> nn.Module:
    """A frozen stack of GPT blocks with adapters at their attention."""
    torch.manual_seed(0)
    blocks: Any = [Block(WIDTH, HEADS).requires_grad_(False) for _ in range(LAYERS)]
    for block in blocks:
        block.qkv, block.proj = Adapter(block.qkv), Adapter(block.proj)
    return nn.Sequential(*blocks)


class Training:
    """A model with its optimizer, trained towards a fixed target."""

    def __init__(self, model: nn.Module, region: Callable[[], Any], tokens: int, dev: Any) -> None:
        torch.manual_seed(1)
        self.model, self.region = model, region
        self.x, self.y = torch.randn(2, 1, tokens, WIDTH).to(dev).unbind(0)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)

    def step(self) -> float:
        self.optimizer.zero_grad()
        with self.region():
            loss = nn.functional.mse_loss(self.model(self.x).float(), self.y)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a model's outputs, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(item)


def same(a: Any, b: Any) -> bool:
    """Whether two outputs are alike in dtypes and every bit."""
    pairs = list(zip(tensors(a), tensors(b), strict=True))
    return bool(pairs) and all(
        x.dtype is y.dtype and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs
    )


def call(model: nn.Module, inputs: Any) -> Any:
    """A tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def figures(times: Times) -> dict[str, float]:
    """The medians in ms, and how many times faster ours is: the median of each round's ratio.

    ``undisturbed`` is the ratio of the fastest tenths, for machines where others run as well.
    """
    fast = {name: sorted(series)[len(series) // 10] for name, series in times.items()}
    return {
        "torch_ms": median(times, "torch") * 1e3,
        "amphal_ms": median(times, "amphal") * 1e3,
        "times_faster": ratio(times, "torch", "amphal"),
        "undisturbed": fast["torch"] / fast["amphal"],
    }


def measure_encoder(plan: amphal.Plan, rounds: int, wait: Any, stock: bool) -> list[dict[str, Any]]:
    """At each number of tokens; the report of ``precast_`` is that of the last."""
    model = encoder(stock).to(plan.device)
    ours = copy.deepcopy(model)
    report = amphal.precast_(ours, example_inputs=torch.randn(1, 8, WIDTH, device=plan.device))
    rows = []
    for tokens, least in ENCODER.items():
        x = torch.randn(1, tokens, WIDTH, device=plan.device)

        def theirs(x: Tensor = x) -> Tensor:
            with torch.autocast(plan.device.type, dtype=plan.dtype):
                return model(x)

        def mine(x: Tensor = x) -> Tensor:
            with amphal.autocast(plan):
                return ours(x)

        with torch.no_grad():
            equal = same(theirs(), mine())
            found = figures(in_turn({"torch": theirs, "amphal": mine}, rounds, wait=wait))
        name = "nn.TransformerEncoder" if stock else "encoder"
        saved = report.bytes_saved
        rows.append({"name": name, "tokens": tokens, "least": least, "bit_equal": equal} | found)
        rows[-1]["bytes_saved"] = saved
    return rows


def measure_lora(plan: amphal.Plan, rounds: int, wait: Any) -> list[dict[str, Any]]:
    """A training step at each number of tokens, after twenty steps whose losses are compared."""
    rows = []
    for tokens, least in LORA.items():
        model = adapted().to(plan.device)
        ours = copy.deepcopy(model)
        x = torch.randn(1, 8, WIDTH, device=plan.device)
        report = amphal.precast_(ours, example_inputs=x)
        torchs = Training(
            model, lambda: torch.autocast(plan.device.type, dtype=plan.dtype), tokens, plan.device
        )
        amphals = Training(ours, lambda: amphal.autocast(plan), tokens, plan.device)
        losses = [torchs.step() for _ in range(20)]
        equal = losses == [amphals.step() for _ in range(20)]
        steps = {"torch": torchs.step, "amphal": amphals.step}
        found = figures(in_turn(steps, rounds, wait=wait))
        row = {"name": "LoRA step", "tokens": tokens, "least": least, "bit_equal": equal}
        rows.append(row | found | {"bytes_saved": report.bytes_saved})
    return rows


def can_run() -> tuple[dict[str, Any], dict[str, str]]:
    """The architectures whose libraries can be imported; the names of the others, and why."""
    chosen = dict(TORCH_ONLY)
    missing: dict[str, str] = {}
    for library, architectures in (("transformers", TRANSFORMERS), ("timm", TIMM)):
        try:
            importlib.import_module(library)
        except Exception as exc:  # timm's torchvision may be built for another torch
            reason = f"{library} can't be imported ({exc}): pip install -e '.[bench]'"
            missing |= dict.fromkeys(architectures, reason)
        else:
            chosen |= architectures
    return chosen, missing


def measure_architectures(plan: amphal.Plan, chosen: dict[str, Any]) -> list[dict[str, Any]]:
    """Outputs on inputs that ``precast_`` has not seen, compared bit for bit."""
    rows = []
    for name, (make, inputs) in chosen.items():
        torch.manual_seed(0)
        model = make().eval().requires_grad_(False).to(plan.device)
        ours = copy.deepcopy(model)
        report = amphal.precast_(ours, example_inputs=_on(inputs(), plan.device))
        x = _on(inputs(), plan.device)
        with torch.no_grad():
            with torch.autocast(plan.device.type, dtype=plan.dtype):
                theirs = call(model, x)
            with amphal.autocast(plan):
                mine = call(ours, x)
        total = sum(p.nbytes for p in model.parameters())
        row = {"name": name, "bit_equal": same(theirs, mine), "cast": len(report.cast)}
        left = {"left": len(report.left), "bytes": total, "bytes_saved": report.bytes_saved}
        rows.append(row | left)
    return rows


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: _on(v, device) for k, v in value.items()}
    return tuple(_on(v, device) for v in value) if isinstance(value, tuple) else value


def measure(
    device: str | None = None, rounds: int = 40, architectures: bool = True
) -> dict[str, Any]:
    """Every figure, as JSON-able values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = amphal.detect(device)
        if plan.dtype is torch.float32:
            plan = amphal.detect(device, precision="bf16")  # bits can be compared all the same
        wait = waiter(plan.device)
        timed = measure_encoder(plan, rounds, wait, stock=False)
        timed += measure_encoder(plan, rounds, wait, stock=True)
        timed += measure_lora(plan, rounds, wait)
        chosen, missing = can_run() if architectures else ({}, {})
        table = measure_architectures(plan, chosen)
    return {
        "torch": torch.__version__,
        "hardware": plan.hardware.name,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "timed": timed,
        "architectures": table,
        "not_run": missing,
    }


def failures(found: dict[str, Any]) -> list[str]:
    """What is not bit-equal, or slower than its limit."""
    rows = [*found["timed"], *found["architectures"]]
    wrong = [f"{r['name']}: the outputs differ" for r in rows if not r["bit_equal"]]
    return wrong + [
        f"{r['name']} at {r['tokens']} tokens: {r['times_faster']:.2f} times, at least {r['least']}"
        for r in found["timed"]
        if r["times_faster"] < r["least"]
    ]


def show(found: dict[str, Any]) -> None:
    """The figures as a person reads them."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    title = f"{found['hardware']}, torch {found['torch']}, {found['dtype']}"
    table = Table(
        "",
        "tokens",
        "torch ms",
        "amphal ms",
        "faster",
        "undisturbed",
        "limit",
        "same bits",
        title=title,
    )
    for r in found["timed"]:
        numbers = (f"{r[k]:.2f}" for k in ("torch_ms", "amphal_ms", "times_faster", "undisturbed"))
        same_bits = "yes" if r["bit_equal"] else "NO"
        table.add_row(r["name"], str(r["tokens"]), *numbers, f"{r['least']}", same_bits)
    console.print(table)
    if found["architectures"]:
        table = Table("", "stored low", "left", "MB", "MB saved", "same bits")
        for r in found["architectures"]:
            sizes = (f"{r[k] / 1e6:.2f}" for k in ("bytes", "bytes_saved"))
            same_bits = "yes" if r["bit_equal"] else "NO"
            table.add_row(r["name"], str(r["cast"]), str(r["left"]), *sizes, same_bits)
        console.print(table)
    for reason in sorted(set(found["not_run"].values())):
        names = [name for name, why in found["not_run"].items() if why == reason]
        console.print(f"not run: {', '.join(names)}: {reason}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="What precast_ gains over torch.autocast alone.")
    parser.add_argument("--device", help="where to measure; by default what amphal.detect() says")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each comparison")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--no-architectures", action="store_true", help="leave that table out")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    found = measure(args.device, args.rounds, not args.no_architectures)
    show(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if any(not r["bit_equal"] for r in [*found["timed"], *found["architectures"]]):
        raise SystemExit("outputs differ:\n  " + "\n  ".join(failures(found)))
    if args.check and (wrong := failures(found)):
        raise SystemExit("missed:\n  " + "\n  ".join(wrong))


if __name__ == "__main__":
    main()
