"""The variance that quantization really added, per KV head, chunk and group of channels (ours).

    eta_j = sum_i sum_{c in j} [(k_hat - mean k_hat)^2 - (k - mean k)^2] / (g sum_i Delta_ij^2 / 12)

Means are per channel over the chunk. Where errors correlate with keys it is eta, not the error's
own variance, that shifts the partition sum: log E[Z_hat/Z] ~ (Var(s_hat) - Var(s)) / 2. It may be
negative (centroids, clipping), and needs no queries. Measured in the coordinates of the noise: keys
are projected off the term's basis and rotated as its queries are. Rows whose weights are all
zero (another term serves them) are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.noise import ScoreNoise
from videokv.protocols import Packed

ETA_RANGE = (-2.0, 4.0)


class Measured:
    """Taylor's terms, every group multiplied by its measured eta."""

    name = "measured"
    reads_queries = False
    stackable = True

    def fit(
        self, packed: Packed, keys: Tensor, queries: Tensor | None, *, scale: float
    ) -> Tensor | None:
        """eta ``[B, Hkv, F of all terms]`` float16 within [-2, 4], None where there is no noise.

        keys: true ``[B, Hkv, T, D]``. One row has no variance: eta is 1 there, Taylor's value.
        """
        terms = packed.noise()
        if not terms:
            return None
        true, noisy = keys.to(torch.float32), packed.decode(torch.float32)
        return torch.cat([_eta(term, true, noisy) for term in terms], -1).to(torch.float16)

    def noise(self, packed: Packed, factors: Tensor | None) -> tuple[ScoreNoise, ...]:
        """The chunk's terms times eta."""
        terms = packed.noise()
        if not terms:
            return ()
        if factors is None:
            raise ValueError(
                "correction 'measured' needs the factors of its fit; commit the chunk with it"
            )
        widths = [packed.shape[3] // term.query_map.group_size for term in terms]
        etas = factors.float().split(widths, -1)
        return tuple(term.scaled(eta[:, :, None, :]) for term, eta in zip(terms, etas, strict=True))


def _eta(term: ScoreNoise, true: Tensor, noisy: Tensor) -> Tensor:
    """``[B, Hkv, F]`` float32."""
    batch, heads, tokens, head_dim = true.shape
    group_size = term.query_map.group_size
    weights = term.weights.float().expand(batch, heads, tokens, head_dim // group_size)
    rows = (weights > 0).any(-1, keepdim=True).float()  # [B, Hkv, T, 1]
    count = rows.sum(2)  # [B, Hkv, 1]
    added = _spread(term, noisy, rows, count) - _spread(term, true, rows, count)
    expected = weights.sum(2) * (group_size / 12)
    eta = (added / expected.clamp(min=torch.finfo(torch.float32).tiny)).clamp(*ETA_RANGE)
    return torch.where((count > 1) & (expected > 0), eta, 1.0)


def _spread(term: ScoreNoise, x: Tensor, rows: Tensor, count: Tensor) -> Tensor:
    """Sum of squared deviations of the rows from their mean, per group: ``[B, Hkv, F]``."""
    mapped = term.query_map.mapped(x)
    mean = (mapped * rows).sum(2, keepdim=True) / count.clamp(min=1).unsqueeze(2)
    squares = ((mapped - mean) * rows).square().sum(2)  # [B, Hkv, D]
    return squares.unflatten(-1, (-1, term.query_map.group_size)).sum(-1)


CORRECTION = Measured()
