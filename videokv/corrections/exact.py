"""Exact correction under the uniform error model: b = sum_c log(sinh(a_c) / a_c).

a_c = scale q_c Delta_c / 2. Taylor's form is its first term; they part where a query has outlier
channels. It is not a product of few columns: only the eager backend computes it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from videokv.noise import ScoreNoise
from videokv.protocols import Packed


class Exact:
    """The same steps, marked exact; nothing is fitted or stored."""

    name = "exact"
    reads_queries = False
    stackable = True
    blank_terms = True

    def fit(
        self, packed: Packed, keys: Tensor, queries: Tensor | None, *, scale: float
    ) -> Tensor | None:
        """None: there is nothing to fit."""
        return None

    def noise(self, packed: Packed, factors: Tensor | None) -> tuple[ScoreNoise, ...]:
        """``packed.noise()`` with ``exact`` set."""
        return tuple(replace(term, exact=True) for term in packed.noise())


CORRECTION = Exact()
