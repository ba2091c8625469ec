"""Where the factor is looked for, and which keys a query is asked about."""

from __future__ import annotations

import torch
from torch import Tensor

FACTOR_RANGE = (-1.0, 2.0)
SMALLEST_SLOPE = 1e-7
NEAR = 1 / 3  # of the chunk's length; the kernel compares 3 |distance| with the length


def far_pairs(rows: int, tokens: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Which of ``tokens`` keys each of ``rows`` evenly spaced queries is asked about, bool [M, T].

    A query without any far key (a chunk of one token) is asked about all.
    """
    places = (2 * torch.arange(rows, device=device) + 1) * tokens // (2 * rows)
    distance = (places[:, None] - torch.arange(tokens, device=device)).abs()
    far = distance >= NEAR * tokens
    return far | ~far.any(-1, keepdim=True)
