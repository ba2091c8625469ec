"""How unbiased codes lie in memory, and the arithmetic that all bodies share.

code    c = code - (L - 1) / 2, L = 2^bits: half-integers, so the grid has no zero point
step    Delta = scale 2^(-code / 20), one byte a group; ``NO_STEP``: the group is all zero
label   2, 3 or 4 bits a token; 0 is the centroid zero, which the table does not hold
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from videokv.kernels.assign_centroids.layout import gather_centroids
from videokv.kernels.pack_codes import unpack

STEPS_AN_OCTAVE = 20
NO_STEP = 255  # the code of a group that is all zero
TRIED = (0.75, 0.9, 1.05, 1.2, 1.4)  # steps tried, in units of the best for Gaussian numbers
GAUSSIAN_STEP = {2: 0.9957, 3: 0.586, 4: 0.3352}
LABEL_BITS = (2, 3, 4)


@dataclass(frozen=True, eq=False)
class Centres:
    """Centroids of a chunk and the one of each token; label 0 is zero.

    ids: packed labels, uint8 ``[B, H, bytes]``; table: E4M3 ``[B, H, K, D]`` for labels 1..K;
    scale: float32 ``[B, H, 1, 1]``, what the table is multiplied by.
    """

    ids: Tensor
    table: Tensor
    scale: Tensor
    label_bits: int
    tokens: int

    def real_table(self) -> Tensor:
        """The centroids of labels 1..K, float32 ``[B, H, K, D]``."""
        return self.table.float() * self.scale

    def gather(self) -> Tensor:
        """The centroid of each token, float32 ``[B, H, T, D]``."""
        labels = unpack(self.ids, bits=self.label_bits, count=self.tokens)
        return gather_centroids(with_zero(self.real_table()), labels)


def with_zero(table: Tensor) -> Tensor:
    """``[B, H, K, D]`` with a row of zeros in front: a row for every label."""
    return torch.cat([torch.zeros_like(table[:, :, :1]), table], 2)


def half_range(bits: int) -> float:
    """Largest magnitude of a code around zero: (L - 1) / 2."""
    return ((1 << bits) - 1) / 2


def largest_group(head_dim: int) -> int:
    """The whole head, or its largest divisor up to 128."""
    return next(size for size in range(min(head_dim, 128), 0, -1) if head_dim % size == 0)


def coded_steps(ideal: Tensor) -> tuple[Tensor, Tensor]:
    """Steps float32 ``[B, H, T, G]`` as uint8, and the largest of each head ``[B, H, 1, 1]``."""
    scale = ideal.amax((2, 3), keepdim=True)
    down = torch.where(ideal > 0, torch.log2(scale / ideal), torch.inf)
    codes = (down * STEPS_AN_OCTAVE).round_().clamp_(0, NO_STEP)
    return codes.to(torch.uint8), scale


def real_steps(codes: Tensor, scale: Tensor) -> Tensor:
    """Delta, float32, of what ``coded_steps`` gave."""
    steps = torch.exp2(codes.float() / -STEPS_AN_OCTAVE) * scale
    return torch.where(codes == NO_STEP, 0.0, steps)
