"""What one call consists of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from videokv.kernels.reconstruct.parts import Parts
from videokv.noise import QueryMap


@dataclass(frozen=True, eq=False)
class PackedCall:
    """query ``[B, Hq, M, D]``; keys and values of one chunk (Hq a multiple of their heads).

    s = scale (q . k + extra_query . extra_keys), with extra_query ``[B, Hq, M, F]`` and extra_keys
    ``[B, Hkv, T, F]`` float32, or None.

    by_steps: instead of columns, s -= sum_j factors_j phi_j Delta_j^2, with the key's own steps
    Delta (axis token) and phi as in ``noise.QueryMap``; factors float32 ``[B, Hkv, G]``, None: 1.
    """

    query: Tensor
    keys: Parts
    values: Parts
    scale: float
    extra_query: Tensor | None = None
    extra_keys: Tensor | None = None
    by_steps: bool = False
    factors: Tensor | None = None

    def __post_init__(self) -> None:
        if self.keys.shape[:3] != self.values.shape[:3]:
            raise ValueError(
                f"keys {self.keys.shape} and values {self.values.shape} are of other tokens"
            )
        if (self.extra_query is None) != (self.extra_keys is None):
            raise ValueError("columns come in pairs: give extra_query and extra_keys, or neither")
        if self.by_steps and (self.keys.axis != "token" or self.extra_query is not None):
            raise ValueError("a correction by steps needs steps of a token, and no columns beside")

    def asked(self, query: Tensor, *, scale: float) -> PackedCall:
        """The same chunk asked by another query of the same shape; no columns. Nothing that is
        checked changes, so that a read of many chunks does not check them again."""
        again = object.__new__(PackedCall)
        again.__dict__.update(self.__dict__, query=query, scale=scale)
        return again

    @property
    def rows(self) -> int:
        """Query rows that share a KV head."""
        return self.query.shape[1] // self.keys.shape[1] * self.query.shape[2]

    @property
    def columns(self) -> int:
        """Columns of the correction, those of steps among them."""
        if self.by_steps:
            return self.keys.steps.shape[3]
        return 0 if self.extra_query is None else self.extra_query.shape[3]

    def with_columns(self) -> PackedCall:
        """The same with its correction written out as columns."""
        if not self.by_steps:
            return self
        omega = key_steps(self.keys).square()
        if self.factors is not None:
            omega = omega * self.factors.unsqueeze(2)
        found = QueryMap(self.keys.group_size, self.keys.rotation)
        phi = found.features(self.query, scale=self.scale) * (-1 / self.scale)
        return replace(self, extra_query=phi, extra_keys=omega, by_steps=False, factors=None)


@dataclass(frozen=True, eq=False)
class Current:
    """Dense rows of a few tokens: key ``[B, Hkv, N, D]``, value ``[B, Hkv, N, Dv]``. causal: query
    m sees the first m + 1 of them (M = N)."""

    key: Tensor
    value: Tensor
    scale: float
    causal: bool = False


def key_steps(parts: Parts) -> Tensor:
    """Delta of steps along channels, float32 ``[B, H, T, G]``."""
    steps = parts.steps.float()
    if parts.log_steps:
        steps = torch.where(parts.steps == 255, 0.0, torch.exp2(steps * -0.05))
    return steps if parts.scale is None else steps * parts.scale.float()
