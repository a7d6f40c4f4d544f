"""torch's casting policies as tables: shared by the backends whose lists torch shares."""

from __future__ import annotations

import torch

from amphal import OpLists

__all__ = ["cpu", "cuda", "mps", "xpu"]


def cpu(dtype: torch.dtype) -> OpLists:
    """The policy of CPU autocast."""
    return OpLists()


cuda = xpu = mps = cpu
