"""What one call consists of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from videokv.kernels.reconstruct.parts import Parts


@dataclass(frozen=True, eq=False)
class PackedCall:
    """query ``[B, Hq, M, D]``; keys and values of one chunk (Hq a multiple of their heads).

    s = scale (q . k + extra_query . extra_keys), with extra_query ``[B, Hq, M, F]`` and extra_keys
    ``[B, Hkv, T, F]`` float32, or None.
    """

    query: Tensor
    keys: Parts
    values: Parts
    scale: float
    extra_query: Tensor | None = None
    extra_keys: Tensor | None = None

    def __post_init__(self) -> None:
        if self.keys.shape[:3] != self.values.shape[:3]:
            raise ValueError(
                f"keys {self.keys.shape} and values {self.values.shape} are of other tokens"
            )
        if (self.extra_query is None) != (self.extra_keys is None):
            raise ValueError("columns come in pairs: give extra_query and extra_keys, or neither")

    @property
    def rows(self) -> int:
        """Query rows that share a KV head."""
        return self.query.shape[1] // self.keys.shape[1] * self.query.shape[2]

    @property
    def columns(self) -> int:
        """Columns of the correction."""
        return 0 if self.extra_query is None else self.extra_query.shape[3]
