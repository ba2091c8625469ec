"""The noise of a whole history, made once: packed chunks do not change between commits.

The weights of all chunks lie side by side in one tensor in the dtype of the columns, each chunk's
own columns alone: T rows of F columns, not of the columns of all maps. What else a read needs
(which maps share a kernel call, their bases in one tensor, where each weight goes) is made at the
first read and kept with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from videokv.kernels.score_columns.placement import Part, Placement
from videokv.noise import QueryMap, ScoreNoise

WIDEST_SHARE = 8  # kept weights of a row take at most the bytes of 1/8 of its key


@dataclass(frozen=True, eq=False)
class HistoryRows:
    """tokens: rows of a segment. first: row of the weights, -1 without noise. maps: its own."""

    tokens: int
    first: int = -1
    maps: tuple[QueryMap, ...] = ()


@dataclass(frozen=True, eq=False)
class HistoryCall:
    """What one kernel call needs of a history.

    numbers: the segments that take part. maps: in the order of their columns. bases: as
    ``stacked_bases`` makes them.
    """

    numbers: tuple[int, ...]
    maps: tuple[QueryMap, ...]
    bases: Tensor | None
    placement: Placement


@dataclass(frozen=True, eq=False)
class History:
    """weights ``[B, Hkv, R, F]`` of all chunks with noise; rows: of every segment, in order."""

    weights: Tensor
    rows: tuple[HistoryRows, ...]
    head_dim: int
    _calls: dict[int, tuple[HistoryCall, ...]] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes held between reads."""
        calls = {id(c.bases): c.bases for made in self._calls.values() for c in made}
        return self.weights.nbytes + sum(b.nbytes for b in calls.values() if b is not None)

    def calls(self, *, budget: int) -> tuple[HistoryCall, ...] | None:
        """Kernel calls of at most ``budget`` columns (see ``first_fit``), made at the first read.

        None where they were not made before the capture of a CUDA graph began: the graph's own
        memory must not be kept.
        """
        if budget not in self._calls:
            if self.weights.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            fits = first_fit([r.maps for r in self.rows], head_dim=self.head_dim, budget=budget)
            self._calls[budget] = tuple(self._call(*fit) for fit in fits)
        return self._calls[budget]

    def _call(self, numbers: tuple[int, ...], maps: tuple[QueryMap, ...]) -> HistoryCall:
        starts, columns = {}, 0
        for query_map in maps:
            starts[id(query_map)] = columns
            columns += self.head_dim // query_map.group_size
        parts = tuple(self._part(self.rows[number], starts) for number in numbers)
        batch, heads = self.weights.shape[:2]
        return HistoryCall(
            numbers,
            maps,
            stacked_bases(maps, batch=batch, heads=heads),
            Placement.of(self.weights, parts, columns=columns),
        )

    def _part(self, rows: HistoryRows, starts: dict[int, int]) -> Part:
        blocks, origin = [], 0
        for query_map in rows.maps:
            count = self.head_dim // query_map.group_size
            blocks.append((starts[id(query_map)], origin, count))
            origin += count
        return Part(rows.tokens, rows.first, tuple(blocks))


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

    rows: tokens and noise of each segment. shape: (B, Hkv, D) of the keys. dtype: of the keys;
    weights are kept in it, float16 ones in float32 (its range does not hold them).

    None where there is nothing to keep: no noise, an exact correction, or weights (a column for
    every channel) that would take more than 1/8 of the bytes of dense keys.
    """
    batch, heads, size = shape
    held = torch.float32 if dtype == torch.float16 else dtype
    maps: list[QueryMap] = []
    found = [_by_map(noise, maps) for _, noise in rows]
    widest = max((sum(size // m.group_size for m, _ in terms) for terms in found), default=0)
    if widest == 0 or any(term.exact for _, noise in rows for term in noise):
        return None
    if widest * held.itemsize * WIDEST_SHARE > size * dtype.itemsize:
        return None
    first = next(term.weights for _, noise in rows for term in noise)
    noisy = sum(tokens for (tokens, _), terms in zip(rows, found, strict=True) if terms)
    weights = first.new_zeros(batch, heads, noisy, widest, dtype=held)
    parts, start = [], 0
    for (tokens, _), terms in zip(rows, found, strict=True):
        own = tuple(m for m, _ in terms)
        parts.append(HistoryRows(tokens, start if terms else -1, own))
        start += tokens if terms else 0
    history = History(weights, tuple(parts), size)
    kept = [_written(history, number, terms) for number, terms in enumerate(found)]
    return history, kept


def _by_map(
    noise: Sequence[ScoreNoise], maps: list[QueryMap]
) -> list[tuple[QueryMap, list[Tensor]]]:
    """The weights for each distinct map, which is looked up in ``maps`` or joins them."""
    found: list[tuple[QueryMap, list[Tensor]]] = []
    for term in noise:
        own = next((m for m in maps if m.same_as(term.query_map)), None)
        if own is None:
            own = term.query_map
            maps.append(own)
        same = next((weights for m, weights in found if m is own), None)
        if same is None:
            found.append((own, [term.weights]))
        else:
            same.append(term.weights)
    return found


def _written(
    history: History, number: int, terms: Sequence[tuple[QueryMap, list[Tensor]]]
) -> tuple[ScoreNoise, ...]:
    rows = history.rows[number]
    kept, column = [], 0
    for query_map, parts in terms:
        count = history.head_dim // query_map.group_size
        place = history.weights[:, :, rows.first : rows.first + rows.tokens]
        place = place[..., column : column + count]
        place.copy_(sum(parts[1:], parts[0]))
        kept.append(HistoryNoise(place, query_map, False, history, number))
        column += count
    return tuple(kept)


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
    return torch.stack(padded).mT.contiguous()
