"""Fourth-order correction: Taylor's term and the next cumulant, -alpha^4/180 per channel.

b -= scale^4/2880 sum_j Delta_ij^4 sum_{c in j} q_c^4. The series is only good for small alpha =
scale q_c Delta / 2. Its use is decided when a chunk is committed, since looking at queries while
reading would stall the GPU: a KV head whose largest alpha^2 over the commit pass's queries exceeds
3 keeps Taylor's term alone (said once), on every backend alike. Use ``exact`` for such models.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from videokv.noise import ScoreNoise
from videokv.protocols import Packed

MAX_ALPHA_SQUARED = 3.0


class Cumulant:
    """Terms of power 2 and 4: twice the columns of Taylor."""

    name = "cumulant"

    def fit(
        self, packed: Packed, keys: Tensor, queries: Tensor | None, *, scale: float
    ) -> Tensor | None:
        """1 where the fourth order is used, else 0: ``[B, Hkv]`` float32 (None without noise).

        Raises ValueError where ``queries`` is None. Synchronises once, to warn.
        """
        terms = packed.noise()
        if not terms:
            return None
        if queries is None:
            raise ValueError(
                "correction 'cumulant' checks its range on the queries of the commit pass, but "
                "the model gave none; pass queries, or use correction 'taylor' or 'exact'"
            )
        peak = torch.stack([_max_alpha_squared(t, packed, queries, scale=scale) for t in terms])
        usable = (peak <= MAX_ALPHA_SQUARED).all(0)
        if not bool(usable.all()):
            warnings.warn(
                f"correction 'cumulant': alpha^2 exceeds {MAX_ALPHA_SQUARED:g} in some heads, "
                "which keep the second-order term alone; use 'exact' there",
                stacklevel=2,
            )
        return usable.float()

    def noise(self, packed: Packed, factors: Tensor | None) -> tuple[ScoreNoise, ...]:
        """Every term of the chunk, each followed by its fourth order."""
        terms = packed.noise()
        if not terms:
            return ()
        if factors is None:
            raise ValueError(
                "correction 'cumulant' needs the factors of its fit; commit the chunk with it"
            )
        return tuple(part for term in terms for part in (term, _fourth(term, factors)))


def _fourth(term: ScoreNoise, factors: Tensor) -> ScoreNoise:
    weights = term.weights.square() * factors[:, :, None, None]
    return ScoreNoise(weights, replace(term.query_map, power=4))


def _max_alpha_squared(
    term: ScoreNoise, packed: Packed, queries: Tensor, *, scale: float
) -> Tensor:
    """Largest (scale q_c Delta / 2)^2 over queries, tokens and channels: ``[B, Hkv]``."""
    batch, heads, _, _ = packed.shape
    groups = term.query_map.mapped(queries).unflatten(-1, (-1, term.query_map.group_size))
    query_peak = groups.square().amax((2, 4)).unflatten(1, (heads, -1)).amax(2)  # [B, Hkv, F]
    peak = query_peak * term.weights.amax(2) * (scale**2 / 4)
    return peak.amax(-1).expand(batch, heads)


CORRECTION = Cumulant()
