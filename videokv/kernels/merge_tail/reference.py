"""The merge in PyTorch steps."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_tail(
    first: Tensor, first_lse: Tensor, parts: Tensor, lses: Tensor
) -> tuple[Tensor, Tensor]:
    """See the package."""
    dtype = torch.promote_types(parts.dtype, torch.float32)
    found = lses.to(dtype).masked_fill(lses == torch.inf, -torch.inf)
    peak = found.amax(0, keepdim=True)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)  # -inf - -inf would be NaN
    shares = torch.exp(found - peak).unsqueeze(-1)
    total = shares.sum(0, keepdim=True)
    # A row that saw no key in a part has whatever output there.
    last = torch.where(shares > 0, shares * parts.to(dtype), 0.0).sum(0, keepdim=True)
    last = last / total.clamp(min=torch.finfo(dtype).tiny)
    last_lse = (peak + total.squeeze(-1).log()).to(first_lse.dtype)
    return torch.cat([first, last.to(first.dtype)], 2), torch.cat([first_lse, last_lse], 2)
