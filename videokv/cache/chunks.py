"""What a layer holds: rows that are not final yet, dense chunks and packed chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from videokv.cache.moment import QueryMoment
from videokv.protocols import Packed, Segment

SAMPLED_QUERIES = 128


@dataclass(frozen=True, eq=False)
class Rows:
    """Dense rows of consecutive tokens from ``start``, each tensor owning its storage.

    keys ``[B, Hkv, T, D]``, values ``[B, Hkv, T, Dv]``, queries ``[B, Hq, T, D]`` or None.
    """

    start: int
    keys: Tensor
    values: Tensor
    queries: Tensor | None

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]

    @property
    def end(self) -> int:
        return self.start + self.tokens

    def __getitem__(self, part: slice) -> Rows:
        """A copy of some rows; all of them are given as they are."""
        first, last, _ = part.indices(self.tokens)
        if (first, last) == (0, self.tokens):
            return self
        return self.each(lambda t: t[:, :, first:last].clone(), start=self.start + first)

    def first(self, count: int) -> Rows:
        """Views of the first rows."""
        return self.each(lambda t: t[:, :, :count])

    def each(self, function: Callable[[Tensor], Tensor], *, start: int | None = None) -> Rows:
        queries = None if self.queries is None else function(self.queries)
        start = self.start if start is None else start
        return Rows(start, function(self.keys), function(self.values), queries)

    def followed_by(self, after: Rows) -> Rows:
        """Both in one; queries are kept only where both have them."""
        queries = None
        if self.queries is not None and after.queries is not None:
            queries = torch.cat([self.queries, after.queries], 2)
        keys = torch.cat([self.keys, after.keys], 2)
        return Rows(self.start, keys, torch.cat([self.values, after.values], 2), queries)


@dataclass(frozen=True, eq=False)
class DenseChunk:
    """A final chunk in the model's dtype: sink, recent, or the cache has no quantizer.

    ordinal: its place among all chunks ever committed. queries: sampled rows
    ``[B, Hq, <= 128, D]`` that the correction will be fitted with once it is packed, or None.
    pinned: stays dense for good (rows of a packed chunk that was cut: packing them again would
    drift).
    """

    ordinal: int
    start: int
    keys: Tensor
    values: Tensor
    queries: Tensor | None = None
    pinned: bool = False

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]

    @property
    def end(self) -> int:
        return self.start + self.tokens

    def stored(self) -> tuple:
        """What attention reads of it; the sampled queries are state, not cache."""
        return (self.keys, self.values)


@dataclass(frozen=True, eq=False)
class PackedChunk:
    """A final chunk in few bits. A side without quantizer is a dense tensor.

    factors: numbers that the correction stored, or None.
    """

    ordinal: int
    start: int
    tokens: int
    keys: Packed | Tensor
    values: Packed | Tensor
    factors: Tensor | None = None

    @property
    def end(self) -> int:
        return self.start + self.tokens

    def stored(self) -> tuple:
        return (self.keys, self.values, self.factors)

    def sides(self) -> list[Packed]:
        """The sides that are really packed."""
        return [side for side in (self.keys, self.values) if not isinstance(side, Tensor)]


Chunk = DenseChunk | PackedChunk


@dataclass(frozen=True, eq=False)
class Job:
    """A dense chunk of a layer that is to be packed, and what its quantizers may know.

    previous: the packed chunk before it. moment: of the queries before this commit.
    """

    layer: int
    chunk: DenseChunk
    previous: PackedChunk | None
    moment: QueryMoment | None


def decoded(side: Packed | Tensor, dtype: torch.dtype) -> Tensor:
    """One side of a packed chunk as ``[B, H, T, D]``."""
    return side if isinstance(side, Tensor) else side.decode(dtype)


def sampled(queries: Tensor | None) -> Tensor | None:
    """At most 128 evenly spaced rows of ``[B, Hq, T, D]``, a copy, without random draws."""
    if queries is None:
        return None
    return queries.index_select(2, _places(queries.shape[2], queries.device))


@functools.lru_cache(maxsize=16)
def _places(tokens: int, device: torch.device) -> Tensor:
    """Which rows are sampled, the same for every layer: int64."""
    count = min(SAMPLED_QUERIES, tokens)
    return (2 * torch.arange(count, device=device) + 1) * tokens // (2 * count)


def sliced(segment: Segment, first: int, last: int) -> Segment:
    """Rows first..last of a segment; noise that is one for all tokens stays as it is."""
    if (first, last) == (0, segment.keys.shape[2]):
        return segment
    noise = tuple(
        term
        if term.weights.shape[2] == 1
        else type(term)(term.weights[:, :, first:last], term.query_map, term.exact)
        for term in segment.noise
    )
    keys, values = (x[:, :, first:last] for x in (segment.keys, segment.values))
    return Segment(keys, values, noise, packed=segment.packed)
