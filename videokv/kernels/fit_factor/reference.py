"""The same in PyTorch steps, scores held in memory; float64 in, float64 out."""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.kernels.fit_factor.range import FACTOR_RANGE, SMALLEST_SLOPE, far_pairs

NEWTON_STEPS = 6


def fit_factor(
    queries: Tensor, true: Tensor, noisy: Tensor, phi: Tensor, weights: Tensor, *, scale: float
) -> Tensor:
    """See the package. Newton's steps from 0."""
    heads, rows = true.shape[1], queries.shape[2]
    near = ~far_pairs(rows, true.shape[2], device=true.device)
    near = near.repeat(queries.shape[1] // heads, 1)  # rows of every query head
    queries, phi = (x.reshape(x.shape[0], heads, -1, x.shape[3]) for x in (queries, phi))
    held, seen = (
        (queries @ keys.transpose(-1, -2) * scale).masked_fill_(near, -torch.inf)
        for keys in (true, noisy)
    )
    target = torch.logsumexp(held, -1).mean(-1)
    weights = weights.expand(*true.shape[:3], phi.shape[3])
    return _newton(seen, phi @ weights.transpose(-1, -2), target)


def _newton(noisy: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """noisy, bias: ``[B, Hkv, R, T]`` (R rows of all query heads); target ``[B, Hkv]``."""
    factor = torch.zeros_like(target)
    for _ in range(NEWTON_STEPS):
        scores = noisy - factor[:, :, None, None] * bias
        gap = torch.logsumexp(scores, -1).mean(-1) - target
        slope = (scores.softmax(-1) * bias).sum(-1).mean(-1)
        factor = (factor + gap / slope.clamp(min=SMALLEST_SLOPE)).clamp(*FACTOR_RANGE)
    return factor
