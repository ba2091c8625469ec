"""How two-level codes lie in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from videokv.kernels.quantize_groups.layout import quotient

BITS = 2
TOP = (1 << BITS) - 1  # codes and zero points are 0..3


@dataclass(frozen=True, eq=False)
class TwoLevelCodes:
    """packed: uint8 ``[B, H, bytes]``, the codes of all tokens in a row; zeros likewise, one a
    group. steps: uint8 ``[B, H, T, G]``, 0 where a group is all zero; scale: float16
    ``[B, H, 1, 1]``: Delta = steps times scale.
    """

    packed: Tensor
    zeros: Tensor
    steps: Tensor
    scale: Tensor


def head_scale(widest: Tensor) -> Tensor:
    """The FP16 scale of heads whose groups span at most ``widest`` (float32)."""
    smallest = torch.finfo(torch.float16).smallest_normal * 2.0**-10
    return quotient(quotient(widest, TOP), 255).clamp(min=smallest).half()
