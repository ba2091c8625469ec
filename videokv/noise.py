"""ScoreNoise: all that quantizers and attention backends share about quantization noise.

A quantized key gives a noisy score ``s + delta``. Every correction but the exact one subtracts

    b[m, i] = sum_f  phi_f(q_m) * omega_f[i]

with key-side weights omega (squared steps per group, times fitted factors) and query-side features
phi (squared norms of the query per group, after the transform that the key's noise went through).
A chunk's noise is a tuple of ScoreNoise terms, whose corrections add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


class KeyTransform(Protocol):
    """The orthogonal map that keys went through before quantization (queries follow it)."""

    def apply(self, x: Tensor) -> Tensor:
        """``[B, H, T, D] -> [B, H, T, D]``."""
        ...


@dataclass(frozen=True, eq=False)
class QueryMap:
    """How a query turns into features phi.

    group_size: channels per feature (1: one feature a channel). F = D / group_size.
    transform: orthogonal map applied to the (projected) query, or None.
    basis: ``[B, Hkv, D, r]`` (or broadcastable): queries are first projected off these directions,
        q - U U^T q, because PSAC repaired the key there (the order: project, then rotate).
    power: 2 for the Taylor term, scale^2/24 * sum q_c^2; 4 for the next cumulant,
        -scale^4/2880 * sum q_c^4.
    """

    group_size: int
    transform: KeyTransform | None = None
    basis: Tensor | None = None
    power: Literal[2, 4] = 2

    def same_as(self, other: QueryMap) -> bool:
        """Whether both give the same features, so that chunks can share columns."""
        return (
            self.group_size == other.group_size
            and self.power == other.power
            and self.transform == other.transform
            and self.basis is other.basis
        )

    def mapped(self, query: Tensor) -> Tensor:
        """The query in the coordinates of the key's noise: ``[B, Hq, M, D]``, at least float32."""
        q = query.to(torch.promote_types(query.dtype, torch.float32))
        if self.basis is not None:
            basis = self.basis.to(q.dtype).repeat_interleave(q.shape[1] // self.basis.shape[1], 1)
            q = q - (q @ basis) @ basis.transpose(-1, -2)
        if self.transform is not None:
            q = self.transform.apply(q)
        return q

    def features(self, query: Tensor, *, scale: float) -> Tensor:
        """phi: ``[B, Hq, M, F]`` for a softmax scale ``scale`` (paper 1, Eq. 13: 1/(24 d))."""
        q = self.mapped(query)
        groups = q.unflatten(-1, (-1, self.group_size))
        if self.power == 2:
            return groups.square().sum(-1) * (scale**2 / 24)
        return groups.square().square().sum(-1) * (-(scale**4) / 2880)


@dataclass(frozen=True, eq=False)
class ScoreNoise:
    """One term of a chunk's correction.

    weights: ``[B, Hkv, T, F]`` (T or F may be 1 and broadcast), float32: Delta^power times factors.
    query_map: the features that go with them.
    exact: the correction is log(sinh(a)/a) summed over channels, a = q_c Delta_c scale / 2, instead
        of its columns; only the eager backend can do it. Weights are then Delta^2.
    """

    weights: Tensor
    query_map: QueryMap
    exact: bool = False

    def __post_init__(self) -> None:
        if self.weights.ndim != 4:
            raise ValueError(
                f"ScoreNoise weights must be [B, Hkv, T, F], got shape {tuple(self.weights.shape)}"
            )

    def scaled(self, factor: Tensor | float) -> ScoreNoise:
        """The same noise with its weights multiplied (factor broadcasts to [B, Hkv, T, F])."""
        return ScoreNoise(self.weights * factor, self.query_map, self.exact)
