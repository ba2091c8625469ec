"""The noise of a whole history, made once: packed chunks do not change.

What a chunk's noise comes to (``ChunkColumns``) is kept as long as the chunk, in the dtype of the
columns and with its own columns alone: a commit makes those of its new chunks. What else a read
needs (which maps share a kernel call, their bases in one tensor, where each weight goes) is made at
the first read after a commit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from videokv.kernels.score_columns.placement import Part, Placement
from videokv.noise import QueryMap, ScoreNoise

Widenings = dict[Hashable, Callable[[Tensor], Tensor]]
"""For each kind of query, what makes its columns."""

WIDEST_SHARE = 8  # kept weights of a row take at most the bytes of 1/8 of its key


@dataclass(frozen=True, eq=False)
class ChunkColumns:
    """Weights ``[B, Hkv, T, F]`` of a chunk's maps side by side, ``counts`` columns each; without
    noise None."""

    weights: Tensor | None = None
    maps: tuple[QueryMap, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes held, those of forgotten rows included."""
        return 0 if self.weights is None else self.weights.untyped_storage().nbytes()

    @functools.cached_property
    def places(self) -> tuple[Tensor, ...]:
        """The weights of each map, views."""
        if self.weights is None:
            return ()
        return (self.weights,) if len(self.counts) == 1 else self.weights.split(self.counts, 3)

    def after(self, rows: int) -> ChunkColumns:
        """Without the first ``rows``, which were forgotten; a view."""
        if self.weights is None or not rows:
            return self
        return ChunkColumns(self.weights[:, :, rows:], self.maps, self.counts)


@dataclass(frozen=True, eq=False)
class HistoryRows:
    """tokens: rows of a segment. weights, maps: its own; no weights without noise. places: the
    weights of each map."""

    tokens: int
    weights: Tensor | None = None
    maps: tuple[QueryMap, ...] = ()
    places: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class HistoryCall:
    """What one kernel call needs of a history.

    numbers: the segments that take part. maps: in the order of their columns. bases: as
    ``stacked_bases`` makes them. widenings: see ``widen_query``.
    """

    numbers: tuple[int, ...]
    maps: tuple[QueryMap, ...]
    bases: Tensor | None
    placement: Placement
    widenings: Widenings = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False)
class History:
    """rows: of every segment, in order, some with noise. shape: (B, Hkv, D) of the keys."""

    rows: tuple[HistoryRows, ...]
    shape: tuple[int, int, int]
    weight_bytes: int
    _calls: dict[int, tuple[HistoryCall, ...]] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes held between reads."""
        calls = {id(c.bases): c.bases for made in self._calls.values() for c in made}
        return self.weight_bytes + sum(b.nbytes for b in calls.values() if b is not None)

    @property
    def head_dim(self) -> int:
        """Channels of a key."""
        return self.shape[2]

    @property
    def is_cuda(self) -> bool:
        """Whether the weights are on a GPU."""
        return next(r.weights.is_cuda for r in self.rows if r.weights is not None)

    def calls(self, *, budget: int) -> tuple[HistoryCall, ...] | None:
        """Kernel calls of at most ``budget`` columns (see ``first_fit``), made at the first read.

        None where they were not made before the capture of a CUDA graph began: the graph's own
        memory must not be kept.
        """
        if budget not in self._calls:
            if self.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            self._calls[budget] = tuple(self._call(*fit) for fit in self._fits(budget))
        return self._calls[budget]

    def _fits(self, budget: int) -> list[tuple[tuple[int, ...], tuple[QueryMap, ...]]]:
        """See ``first_fit``; maps that give the same features are one object here."""
        maps = tuple({id(m): m for rows in self.rows for m in rows.maps}.values())
        if sum(self.head_dim // m.group_size for m in maps) <= budget:
            return [(tuple(range(len(self.rows))), maps)]
        return first_fit([r.maps for r in self.rows], head_dim=self.head_dim, budget=budget)

    def _call(self, numbers: tuple[int, ...], maps: tuple[QueryMap, ...]) -> HistoryCall:
        starts, columns = {}, 0
        for query_map in maps:
            starts[id(query_map)] = columns
            columns += self.head_dim // query_map.group_size
        rows = [self.rows[number] for number in numbers]
        parts = tuple(self._part(each, starts) for each in rows)
        batch, heads, _ = self.shape
        return HistoryCall(
            numbers,
            maps,
            stacked_bases(maps, batch=batch, heads=heads),
            Placement.of([each.weights for each in rows], parts, columns=columns),
        )

    def _part(self, rows: HistoryRows, starts: dict[int, int]) -> Part:
        blocks, origin = [], 0
        for query_map in rows.maps:
            count = self.head_dim // query_map.group_size
            blocks.append((starts[id(query_map)], origin, count))
            origin += count
        return Part(rows.tokens, tuple(blocks))


@dataclass(frozen=True, eq=False)
class HistoryNoise(ScoreNoise):
    """A term whose weights are a view of a history's; number: its segment there."""

    history: History | None = None
    number: int = 0


def keep_noise(
    rows: Sequence[tuple[int, tuple[ScoreNoise, ...]]],
    *,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> tuple[History, list[tuple[ScoreNoise, ...]]] | None:
    """The history of segments in order, and the noise of each with its weights there.

    rows: tokens and noise of each segment. shape: (B, Hkv, D) of the keys. dtype: of the keys.

    None where there is nothing to keep: no noise, or noise that ``chunk_columns`` does not keep.
    """
    made = []
    for tokens, noise in rows:
        columns = chunk_columns(noise, tokens=tokens, shape=shape, dtype=dtype)
        if columns is None:
            return None
        made.append((tokens, columns))
    return history_from(made, shape=shape)


def chunk_columns(
    noise: Sequence[ScoreNoise],
    *,
    tokens: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> ChunkColumns | None:
    """What is kept of a chunk's noise. shape: (B, Hkv, D) of the keys. dtype: of the keys; weights
    are kept in it, float16 ones in float32 (its range does not hold them).

    None for an exact correction, and for weights (a column for every channel) that would take more
    than 1/8 of the bytes of dense keys.
    """
    if not noise:
        return ChunkColumns()
    batch, heads, size = shape
    held = torch.float32 if dtype == torch.float16 else dtype
    terms = _by_map(noise)
    counts = tuple(size // query_map.group_size for query_map, _ in terms)
    if any(term.exact for term in noise):
        return None
    if sum(counts) * held.itemsize * WIDEST_SHARE > size * dtype.itemsize:
        return None
    weights = noise[0].weights.new_empty(batch, heads, tokens, sum(counts), dtype=held)
    made = ChunkColumns(weights, tuple(query_map for query_map, _ in terms), counts)
    for place, (_, parts) in zip(made.places, terms, strict=True):
        place.copy_(sum(parts[1:], parts[0]))
    return made


def history_from(
    segments: Sequence[tuple[int, ChunkColumns]], *, shape: tuple[int, int, int]
) -> tuple[History, list[tuple[ScoreNoise, ...]]] | None:
    """See ``keep_noise``; segments: tokens and columns of each. None without any noise."""
    maps: list[QueryMap] = []
    rows = []
    for tokens, columns in segments:
        own = tuple(_known(query_map, maps) for query_map in columns.maps)
        rows.append(HistoryRows(tokens, columns.weights, own, columns.places))
    if not maps:
        return None
    history = History(tuple(rows), shape, sum(columns.nbytes for _, columns in segments))
    return history, [_noise(history, number) for number in range(len(rows))]


def _known(query_map: QueryMap, maps: list[QueryMap]) -> QueryMap:
    """The one of ``maps`` that gives the same features, or this one, which joins them."""
    for held in maps:
        if held is query_map or held.same_as(query_map):
            return held
    maps.append(query_map)
    return query_map


def _by_map(noise: Sequence[ScoreNoise]) -> list[tuple[QueryMap, list[Tensor]]]:
    """The weights for each distinct map."""
    maps: list[QueryMap] = []
    found: dict[int, list[Tensor]] = {}
    for term in noise:
        own = _known(term.query_map, maps)
        found.setdefault(id(own), []).append(term.weights)
    return [(own, found[id(own)]) for own in maps]


def _noise(history: History, number: int) -> tuple[ScoreNoise, ...]:
    """Of a segment, views of its weights."""
    rows = history.rows[number]
    return tuple(
        HistoryNoise(place, query_map, False, history, number)
        for place, query_map in zip(rows.places, rows.maps, strict=True)
    )


def history_of(rows: Sequence[tuple[int, tuple[ScoreNoise, ...]]]) -> History | None:
    """The history that the first of these segments (tokens, noise) are, all of it and in order.

    None where they are not, or where later ones carry noise too.
    """
    first = next((noise[0] for _, noise in rows if noise), None)
    history = first.history if isinstance(first, HistoryNoise) else None
    if history is None or len(rows) < len(history.rows):
        return None
    for number, (held, (tokens, noise)) in enumerate(zip(history.rows, rows, strict=False)):
        if tokens != held.tokens or len(noise) != len(held.maps):
            return None
        for term in noise:
            if not isinstance(term, HistoryNoise):
                return None
            if term.history is not history or term.number != number:
                return None
    return None if any(noise for _, noise in rows[len(history.rows) :]) else history


def first_fit(
    wanted: Sequence[Sequence[QueryMap]], *, head_dim: int, budget: int
) -> list[tuple[tuple[int, ...], tuple[QueryMap, ...]]]:
    """(segments, their distinct maps) of as few calls as first fit finds.

    wanted: the maps of each segment. One that alone needs more columns than ``budget`` gets a call
    with as many as it needs; those without maps go with the first call.
    """
    calls: list[tuple[list[int], list[QueryMap]]] = []
    for number, maps in enumerate(wanted):
        for numbers, held in calls:
            new = _new(maps, held)
            columns = sum(head_dim // m.group_size for m in (*held, *new))
            if not new or columns <= budget:
                numbers.append(number)
                held += new
                break
        else:
            calls.append(([number], _new(maps, [])))
    return [(tuple(numbers), tuple(held)) for numbers, held in calls]


def _new(maps: Sequence[QueryMap], held: Sequence[QueryMap]) -> list[QueryMap]:
    new: list[QueryMap] = []
    for query_map in maps:
        if not any(query_map is m or query_map.same_as(m) for m in (*held, *new)):
            new.append(query_map)
    return new


def stacked_bases(maps: Sequence[QueryMap], *, batch: int, heads: int) -> Tensor | None:
    """The bases of all maps that have one, directions as rows: ``[n, B, Hkv, rank, D]``.

    Those of a smaller rank get directions of zeros, which take nothing off a query.
    """
    held = [m.basis for m in maps if m.basis is not None]
    if not held:
        return None
    rank = max(b.shape[3] for b in held)
    dtype = max((b.dtype for b in held), key=lambda kind: kind.itemsize)
    padded = [
        functional.pad(b.to(dtype), (0, rank - b.shape[3])).expand(batch, heads, -1, -1)
        if b.shape != (batch, heads, b.shape[2], rank) or b.dtype != dtype
        else b
        for b in held
    ]
    # Rows of numbers are joined by one launch, tensors of five dimensions by one each.
    whole = torch.stack([b.reshape(-1) for b in padded])
    return whole.view(len(held), *padded[0].shape).mT.contiguous()
