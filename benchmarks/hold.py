"""What ``amphal.hold_casts`` gains: four forwards under one hold, beside torch.autocast alone.

    python benchmarks/hold.py [--rounds 20] [--json PATH]

Six blocks of 768 and 3072; the optimizer does not step in between, and outputs are compared first.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from _timing import in_turn, ratio
from torch import Tensor, nn

import amphal


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.LayerNorm(768), nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768))
        for _ in range(6)
    )
    return nn.Sequential(*blocks)


def forwards(net: nn.Module, x: Tensor) -> list[Tensor]:
    found = []
    for _ in range(4):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found.append(net(x))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures")
    args = parser.parse_args()
    net = model()
    gains: dict[int, float] = {}

    def held(x: Tensor) -> list[Tensor]:
        with amphal.hold_casts(net):
            return forwards(net, x)

    for tokens in (1, 8, 32, 128):
        x = torch.randn(tokens, 768)
        assert all(torch.equal(a, b) for a, b in zip(held(x), forwards(net, x), strict=True))
        variants = {"torch": partial(forwards, net, x), "held": partial(held, x)}
        gains[tokens] = ratio(in_turn(variants, args.rounds), "torch", "held")
        print(f"{tokens:4} tokens: {gains[tokens]:.2f} times faster than torch")
    if args.json:
        args.json.write_text(json.dumps(gains) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
