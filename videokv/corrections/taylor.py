"""Second-order correction: half the variance of a uniform error, b = sigma^2 / 2.

b[m, i] = scale^2/24 sum_j Delta_ij^2 sum_{c in j} q_c^2 (paper 1, Eq. 13, where scale^2 is 1/d).
"""

from __future__ import annotations

from torch import Tensor

from videokv.noise import ScoreNoise
from videokv.protocols import Packed


class Taylor:
    """The noise of the steps as they are; nothing is fitted or stored."""

    name = "taylor"
    reads_queries = False
    stackable = True
    blank_terms = True

    def fit(
        self, packed: Packed, keys: Tensor, queries: Tensor | None, *, scale: float
    ) -> Tensor | None:
        """None: there is nothing to fit."""
        return None

    def noise(self, packed: Packed, factors: Tensor | None) -> tuple[ScoreNoise, ...]:
        """``packed.noise()``."""
        return packed.noise()


CORRECTION = Taylor()
