"""One factor per KV head and chunk that puts the chunk's log partition sum back (ours).

    mean over queries of lse_far(s_hat - lambda b) = mean of lse_far(s)

When a chunk is committed its true keys are still there, and so are its own queries. They stand for
the queries to come, which will see the chunk from afar: each is asked only about keys at least a
third of the chunk away from it (another frame of a video chunk). Its neighbours would rule the sum,
and quantizers that shrink peaks (ternary, centroids) would seem to lose mass that later queries
find untouched. Six Newton steps from 0 on lambda, within [-1, 2]; the function is convex and
falling. No noise model needs to be right, so it also serves errors that correlate with the key, and
sits on the projected features of PSAC. Columns and read cost are Taylor's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from videokv.noise import ScoreNoise
from videokv.protocols import Packed

NEWTON_STEPS = 6
FACTOR_RANGE = (-1.0, 2.0)
SMALLEST_SLOPE = 1e-7
NEAR = 1 / 3  # of the chunk's length


class Calibrated:
    """Taylor's terms, all multiplied by one fitted number per KV head and chunk."""

    name = "calibrated"

    def fit(
        self, packed: Packed, keys: Tensor, queries: Tensor | None, *, scale: float
    ) -> Tensor | None:
        """lambda ``[B, Hkv]`` float32, or None where the chunk has no noise.

        keys: true ``[B, Hkv, T, D]``. queries: evenly spaced rows ``[B, Hq, M, D]`` of the chunk,
        same coordinates. scale: softmax scale. Raises ValueError where ``queries`` is None or
        empty.
        """
        terms = packed.noise()
        if not terms:
            return None
        if queries is None or queries.shape[2] == 0:
            raise ValueError(
                "correction 'calibrated' is fitted on the queries of the commit pass, but the "
                "model gave none; pass queries, or use correction 'taylor' or 'measured'"
            )
        rows = queries.to(torch.float32)
        true = _by_head(_scores(rows, keys.to(torch.float32), scale), keys.shape[1])
        noisy = _by_head(_scores(rows, packed.decode(torch.float32), scale), keys.shape[1])
        bias = _by_head(_bias(terms, rows, packed.shape, scale), keys.shape[1])
        near = ~far_pairs(rows.shape[2], keys.shape[2], device=keys.device)
        near = near.repeat(rows.shape[1] // keys.shape[1], 1)  # rows of every query head
        true, noisy = (scores.masked_fill_(near, -torch.inf) for scores in (true, noisy))
        return _newton(noisy, bias, torch.logsumexp(true, -1).mean(-1))

    def noise(self, packed: Packed, factors: Tensor | None) -> tuple[ScoreNoise, ...]:
        """The chunk's terms times lambda."""
        terms = packed.noise()
        if not terms:
            return ()
        if factors is None:
            raise ValueError(
                "correction 'calibrated' needs the factors of its fit; commit the chunk with it"
            )
        return tuple(term.scaled(factors[:, :, None, None]) for term in terms)


def far_pairs(rows: int, tokens: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Which of ``tokens`` keys each of ``rows`` evenly spaced queries is asked about, bool [M, T].

    A query without any far key (a chunk of one token) is asked about all.
    """
    places = (2 * torch.arange(rows, device=device) + 1) * tokens // (2 * rows)
    distance = (places[:, None] - torch.arange(tokens, device=device)).abs()
    far = distance >= NEAR * tokens
    return far | ~far.any(-1, keepdim=True)


def _newton(noisy: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """noisy, bias: ``[B, Hkv, R, T]`` (R rows of all query heads); target ``[B, Hkv]``."""
    factor = torch.zeros_like(target)
    for _ in range(NEWTON_STEPS):
        scores = noisy - factor[:, :, None, None] * bias
        gap = torch.logsumexp(scores, -1).mean(-1) - target
        slope = (scores.softmax(-1) * bias).sum(-1).mean(-1)
        factor = (factor + gap / slope.clamp(min=SMALLEST_SLOPE)).clamp(*FACTOR_RANGE)
    return factor


def _scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """``[B, Hq, M, T]``."""
    repeats = queries.shape[1] // keys.shape[1]
    return queries @ keys.repeat_interleave(repeats, 1).transpose(-1, -2) * scale


def _bias(
    terms: Sequence[ScoreNoise], queries: Tensor, shape: tuple[int, int, int, int], scale: float
) -> Tensor:
    """Sum of the terms' corrections, ``[B, Hq, M, T]``."""
    batch, heads, tokens, _ = shape
    total = queries.new_zeros(*queries.shape[:3], tokens)
    for term in terms:
        phi = term.query_map.features(queries, scale=scale)
        weights = term.weights.to(phi.dtype).expand(batch, heads, tokens, phi.shape[3])
        weights = weights.repeat_interleave(queries.shape[1] // heads, 1)
        total += phi @ weights.transpose(-1, -2)
    return total


def _by_head(x: Tensor, heads: int) -> Tensor:
    """``[B, Hq, M, T] -> [B, Hkv, Hq/Hkv M, T]``."""
    return x.reshape(x.shape[0], heads, -1, x.shape[3])


CORRECTION = Calibrated()
