"""The merge in PyTorch steps."""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.attention.merge import merge_parts


def merge_tail(
    first: Tensor, first_lse: Tensor, parts: Tensor, lses: Tensor
) -> tuple[Tensor, Tensor]:
    """See the package."""
    last, last_lse = merge_parts(list(zip(parts.split(1), lses.split(1), strict=True)))
    return torch.cat([first, last], 2), torch.cat([first_lse, last_lse], 2)
