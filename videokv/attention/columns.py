"""The correction as extra channels of q and k, so that any stock kernel computes it.

    scale [q, -phi/scale] . [k, omega] = scale q.k - sum_f phi_f omega_f

Chunks with the same query map share columns; a chunk without a map has zeros in its columns, so its
scores are corrected by exactly zero.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from videokv.attention.adjacent import as_one, joined
from videokv.kernels.score_columns import (
    HistoryCall,
    KeyBlock,
    fill_key_columns,
    first_fit,
    history_of,
    place_key_columns,
    widen_query,
)
from videokv.kernels.score_columns.reference import query_columns
from videokv.noise import QueryMap
from videokv.protocols import Segment

COLUMN_BUDGET = 32


@dataclass(frozen=True, eq=False)
class ColumnCall:
    """One kernel call: segments, and the distinct query maps their columns need.

    kept: what a cache's history remembers of the call, its segments being the first ones here.
    """

    segments: tuple[Segment, ...]
    maps: tuple[QueryMap, ...] = ()
    kept: HistoryCall | None = None

    @functools.cached_property
    def columns(self) -> int:
        """Columns appended to q and k."""
        head_dim = self.segments[0].keys.shape[3]
        return sum(head_dim // m.group_size for m in self.maps)

    def joined(self, segment: Segment) -> ColumnCall:
        """The same call with one more segment."""
        maps = list(self.maps)
        for term in segment.noise:
            if not any(term.query_map.same_as(m) for m in maps):
                maps.append(term.query_map)
        return ColumnCall((*self.segments, segment), tuple(maps))


def plan_calls(
    segments: Sequence[Segment], *, budget: int = COLUMN_BUDGET
) -> tuple[ColumnCall, ...]:
    """Segments packed into as few calls as first fit finds, each of at most ``budget`` columns.

    A segment that alone needs more columns than the budget gets a call with as many as it needs.
    Segments without noise go with the first call. Segments that begin with a cache's history have
    its calls, which are made once.
    """
    if not segments:
        return ()
    history = history_of([(s.keys.shape[2], s.noise) for s in segments])
    kept = None if history is None else history.calls(budget=budget)
    if history is not None and kept is not None:
        later = tuple(range(len(history.rows), len(segments)))
        fits = [(c.numbers, c.maps, c) for c in kept]
        fits[0] = (fits[0][0] + later, *fits[0][1:])
        return tuple(
            ColumnCall(tuple(segments[n] for n in numbers), maps, call)
            for numbers, maps, call in fits
        )
    maps = [[term.query_map for term in s.noise] for s in segments]
    found = first_fit(maps, head_dim=segments[0].keys.shape[3], budget=budget)
    return tuple(ColumnCall(tuple(segments[n] for n in numbers), own) for numbers, own in found)


def with_columns(
    query: Tensor, call: ColumnCall, *, scale: float, width: int
) -> tuple[Tensor, Tensor]:
    """q ``[B, Hq, M, width]`` and k ``[B, Hkv, T, width]`` with columns, zero-padded to width.

    In float16 every column of q and k is brought to the same size by a power of two, so that
    neither overflows nor goes subnormal; what remains is the rounding of both factors, an error of
    at most 2^-7 of b in bfloat16 and 2^-10 in float16.
    """
    head_dim = query.shape[3]
    if width == head_dim:
        return query, joined([s.keys for s in call.segments])
    end = head_dim + call.columns
    if call.columns and query.dtype == torch.float16:
        wide_query = query.new_zeros(*query.shape[:3], width)
        wide_query[..., :head_dim] = query
        wide_keys = _widened(call.segments, width)
        wide_keys[..., end:] = 0
        phi, omega = balance(*score_columns(query, call, scale=scale))
        wide_query[..., head_dim:end] = phi
        wide_keys[..., head_dim:end] = omega
        return wide_query, wide_keys
    # BF16 has float32's range: nothing to balance
    wide_keys = _widened(call.segments, width)
    write_key_columns(wide_keys[..., head_dim:], call)
    return query_with_columns(query, call, scale=scale, width=width), wide_keys


def query_with_columns(query: Tensor, call: ColumnCall, *, scale: float, width: int) -> Tensor:
    """``[B, Hq, M, width]``: the query and its columns, zero-padded."""
    return widen_query(
        query,
        call.maps,
        scale=scale,
        width=width,
        kv_heads=call.segments[0].keys.shape[1],
        bases=None if call.kept is None else call.kept.bases,
        known=None if call.kept is None else call.kept.widenings,
    )


def write_key_columns(out: Tensor, call: ColumnCall) -> None:
    """omega of all segments into ``out`` ``[B, Hkv, T, >= columns]``, zeros into the rest of it."""
    if call.kept is not None:
        place_key_columns(out, call.kept.placement)
        return
    head_dim = call.segments[0].keys.shape[3]
    first = 0
    bare: int | None = None  # start of rows without noise: neighbours are written together
    for segment in call.segments:
        last = first + segment.keys.shape[2]
        blocks = _blocks(segment, call, head_dim)
        if blocks:
            if bare is not None:
                fill_key_columns(out[:, :, bare:first], [])
            fill_key_columns(out[:, :, first:last], blocks)
            bare = None
        elif bare is None:
            bare = first
        first = last
    if bare is not None:
        fill_key_columns(out[:, :, bare:first], [])


def spare_columns(segments: Sequence[Segment], columns: int, *, dtype: torch.dtype) -> Tensor:
    """Room ``[B, Hkv, T, columns]`` for columns of all keys: after them where there is some."""
    keys = [s.keys for s in segments]
    head_dim = keys[0].shape[3]
    fits = keys[0].dtype == dtype and all(s.spare >= columns for s in segments)
    rows = as_one(keys) if fits else None
    if rows is not None:
        shape = (*rows.shape[:3], columns)
        return rows.as_strided(shape, rows.stride(), rows.storage_offset() + head_dim)
    tokens = sum(k.shape[2] for k in keys)
    return keys[0].new_empty(*keys[0].shape[:2], tokens, columns, dtype=dtype)


def _widened(segments: Sequence[Segment], width: int) -> Tensor:
    """All keys ``[B, Hkv, T, width]``, nothing after them yet: in place where there is room."""
    keys = [s.keys for s in segments]
    head_dim = keys[0].shape[3]
    rows = as_one(keys) if all(s.spare >= width - head_dim for s in segments) else None
    if rows is not None:
        return rows.as_strided((*rows.shape[:3], width), rows.stride(), rows.storage_offset())
    tokens = sum(k.shape[2] for k in keys)
    wide = keys[0].new_empty(*keys[0].shape[:2], tokens, width)
    start = 0
    for part in keys:
        wide[:, :, start : start + part.shape[2], :head_dim] = part
        start += part.shape[2]
    return wide


def score_columns(query: Tensor, call: ColumnCall, *, scale: float) -> tuple[Tensor, Tensor]:
    """-phi/scale ``[B, Hq, M, F]`` and omega ``[B, Hkv, T, F]``, at least float32."""
    phi = query_columns(query, call.maps, scale=scale)
    batch, heads = call.segments[0].keys.shape[:2]
    tokens = sum(s.keys.shape[2] for s in call.segments)
    omega = phi.new_empty(batch, heads, tokens, phi.shape[3])
    write_key_columns(omega, call)
    return phi, omega


def _blocks(segment: Segment, call: ColumnCall, head_dim: int) -> list[KeyBlock]:
    """(first column, weights of all columns of a map) for the maps that a segment has."""
    found = []
    start = 0
    for query_map in call.maps:
        columns = head_dim // query_map.group_size
        weights = [t.weights for t in segment.noise if t.query_map.same_as(query_map)]
        if weights:
            total = weights[0] if len(weights) == 1 else sum(weights[1:], weights[0])
            found.append((start, total.expand(*total.shape[:3], columns)))
        start += columns
    return found


def balance(phi: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """Scale column f of phi by 2^n and of omega by 2^-n (n per batch, KV head and column).

    n makes the largest entries of both alike; their product does not change. A column that is zero
    on one side is set to zero on both: 0 times an overflow would be NaN.
    """
    heads = omega.shape[1]
    query_peak = phi.abs().amax(2).unflatten(1, (heads, -1)).amax(2)  # [B, Hkv, F]
    key_peak = omega.abs().amax(2)
    usable = (query_peak > 0) & (key_peak > 0)
    exponent = ((torch.log2(key_peak) - torch.log2(query_peak)) / 2).round().clamp(-60, 60)
    exponent = torch.where(usable, exponent, 0.0)
    up = torch.where(usable, torch.exp2(exponent), 0.0)
    down = torch.where(usable, torch.exp2(-exponent), 0.0)
    repeats = phi.shape[1] // heads
    return phi * up.repeat_interleave(repeats, 1).unsqueeze(2), omega * down.unsqueeze(2)
