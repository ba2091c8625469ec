"""One factor per KV head and chunk that puts the chunk's log partition sum back (ours).

    mean over queries of lse_far(s_hat - lambda b) = mean of lse_far(s)

When a chunk is committed its true keys are still there, and so are its own queries. They stand for
the queries to come, which will see the chunk from afar: each is asked only about keys at least a
third of the chunk away from it (another frame of a video chunk). Its neighbours would rule the sum,
and quantizers that shrink peaks (ternary, centroids) would seem to lose mass that later queries
find untouched. lambda is looked for within [-1, 2] (kernels/fit_factor); the function is convex and
falling. No noise model needs to be right, so it also serves errors that correlate with the key, and
sits on the projected features of PSAC. Columns and read cost are Taylor's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from videokv.kernels.fit_factor import FACTOR_RANGE, far_pairs, fit_factor
from videokv.noise import ScoreNoise
from videokv.protocols import Packed

__all__ = ["CORRECTION", "FACTOR_RANGE", "Calibrated", "far_pairs"]


class Calibrated:
    """Taylor's terms, all multiplied by one fitted number per KV head and chunk."""

    name = "calibrated"
    stackable = True
    blank_terms = True

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
        phi, weights = _columns(terms, queries, packed.shape, scale=scale)
        dtype = torch.promote_types(queries.dtype, keys.dtype)
        decoded = packed.decode(torch.float32)
        return fit_factor(
            queries.to(dtype), keys.to(dtype), decoded, phi, weights, scale=scale
        ).float()

    def noise(self, packed: Packed, factors: Tensor | None) -> tuple[ScoreNoise, ...]:
        """The chunk's terms times lambda."""
        terms = packed.noise()
        if not terms:
            return ()
        if factors is None:
            raise ValueError(
                "correction 'calibrated' needs the factors of its fit; commit the chunk with it"
            )
        factor = factors[:, :, None, None]
        return tuple(term.scaled(factor) for term in terms)


def _columns(
    terms: Sequence[ScoreNoise],
    queries: Tensor,
    shape: tuple[int, int, int, int],
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Features ``[B, Hq, M, F]`` and weights ``[B, Hkv, T, F]`` of all terms side by side."""
    features = [term.query_map.features(queries, scale=scale) for term in terms]
    if len(terms) == 1:
        return features[0], terms[0].weights
    weights = [
        term.weights.expand(*shape[:3], phi.shape[3])
        for term, phi in zip(terms, features, strict=True)
    ]
    return torch.cat(features, -1), torch.cat(weights, -1)


CORRECTION = Calibrated()
