"""The processes of a distributed run of train.py: who they are, and what they share."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Group:
    """The processes that train one model together; by default this one alone."""

    rank: int = 0
    size: int = 1

    @property
    def handle(self) -> Any:
        """The torch process group, None for a process alone. Not kept: see :func:`leave`."""
        return dist.group.WORLD if self.size > 1 else None

    def spread(self, model: nn.Module) -> nn.Module:
        """The model as it is called in training: its gradients are then the mean over the group."""
        return DistributedDataParallel(model) if self.handle else model

    def share(self, items: Tensor) -> Tensor:
        """This process's part of what all of them drew alike."""
        return items[self.rank :: self.size]

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the group, element by element."""
        if self.handle:
            dist.all_reduce(values, group=self.handle)
        return values / self.size

    def all(self, yes: bool) -> bool:
        """Whether it is so in every process."""
        if not self.handle:
            return yes
        votes = torch.tensor(int(yes))
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self.handle)
        return bool(votes)


def launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(script: str, processes: int, argv: list[str]) -> None:
    """Start ``processes`` of this script on this machine, and wait for them."""
    torchrun(["--standalone", f"--nproc-per-node={processes}", script, *argv])


def join() -> Group:
    """The group that torchrun made this process part of, each with an accelerator of its own."""
    if not launched():
        return Group()
    accelerators = torch.accelerator.device_count()
    if accelerators:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % accelerators)
    dist.init_process_group()
    return Group(dist.get_rank(), dist.get_world_size())


def leave() -> None:
    """End the group, once the model and the scaler that know it are gone.

    Then its threads end here. With gloo a thread that still lets go of the last gradients while
    Python shuts down aborts the process (seen with torch 2.13, in scripts without amphal too).
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
