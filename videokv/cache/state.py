"""What a layer of a cache remembers, how all layers encode, and what a commit is about to do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from videokv.cache.chunks import Chunk, Rows
from videokv.cache.moment import QueryMoment, reads_queries
from videokv.cache.policy import CachePolicy
from videokv.protocols import Correction, Quantizer


@dataclass(frozen=True)
class Coding:
    """How all layers encode. ``keys`` or ``values`` None: that side stays dense."""

    keys: Quantizer | None
    values: Quantizer | None
    correction: Correction | None
    policy: CachePolicy
    seed: int

    @property
    def dense(self) -> bool:
        """Whether nothing is ever packed."""
        return self.keys is None and self.values is None

    @property
    def reads_queries(self) -> bool:
        """Whether a quantizer or the correction's fit looks at queries."""
        return any(map(reads_queries, (self.keys, self.values, self.correction)))


@dataclass(frozen=True, eq=False)
class Layout:
    """What every later write must agree with."""

    batch: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> Layout:
        batch, heads, _, size = keys.shape
        return cls(batch, heads, size, values.shape[3], keys.dtype, keys.device)

    def describe(self) -> str:
        return (
            f"batch {self.batch}, {self.kv_heads} key/value heads, head sizes {self.key_dim} and "
            f"{self.value_dim}, {self.dtype} on {self.device}"
        )

    def token_bytes(self) -> int:
        """Bytes of one token, all batch rows and heads, in the model's dtype."""
        return self.row_bytes(self.key_dim + self.value_dim)

    def row_bytes(self, size: int) -> int:
        """Bytes of ``size`` channels of one token."""
        return self.batch * self.kv_heads * size * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class LayerState:
    """Everything a layer remembers; replaced as a whole, so that a failed commit undoes itself.

    length: tokens committed since the start, dropped ones included. first: the oldest token that
    may be read (those before it were forgotten). next_ordinal: of the next chunk; it goes on
    counting when chunks are dropped, so that no later one becomes a sink. chunks: final, in order.
    open: committed rows waiting to fill a chunk. tail: rows written but not committed.
    """

    length: int = 0
    first: int = 0
    next_ordinal: int = 0
    chunks: tuple[Chunk, ...] = ()
    open: Rows | None = None
    tail: Rows | None = None
    moment: QueryMoment | None = None
    layout: Layout | None = None


@dataclass
class Commit:
    """A commit under way: the state that it ends in, whose chunks are still being packed.

    chunks: those held and the new ones, in order. places: of those that are to be packed. surplus:
    ordinals of those that are dropped at the end.
    """

    end: LayerState
    chunks: list[Chunk]
    places: list[int]
    surplus: set[int]
