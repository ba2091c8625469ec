"""Blocks of true and quantized scores of one past, without a tensor of all scores.

Rows are the queries of all heads that share a KV head; columns are the keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from videokv.noise import ScoreNoise
from videokv.protocols import Segment

SERIES_BELOW = 1e-2


@dataclass(frozen=True, eq=False)
class Past:
    """The cached tokens, exact and as they are held.

    keys ``[B, Hkv, S, D]``, values ``[B, Hkv, S, Dv]``: exact. held: the same tokens in order as
    decoded segments, with the noise that a correction subtracts (() to correct nothing).
    """

    keys: Tensor
    values: Tensor
    held: tuple[Segment, ...]

    def __post_init__(self) -> None:
        keys = sum(s.keys.shape[2] for s in self.held)
        if self.keys.ndim != 4 or self.values.shape[:3] != self.keys.shape[:3]:
            raise ValueError(
                "keys and values must be [B, Hkv, S, D] and agree in B, Hkv and S, got "
                f"{tuple(self.keys.shape)} and {tuple(self.values.shape)}"
            )
        if not self.keys.shape[2] or keys != self.keys.shape[2]:
            raise ValueError(
                f"the held segments must cover the {self.keys.shape[2]} exact tokens (at least "
                f"one), got {keys}"
            )

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True, eq=False)
class Block:
    """Scores ``[B, Hkv, R, n]`` of n keys from token ``start`` on, and both kinds of values
    ``[B, Hkv, n, Dv]``. In the current chunk both are the same tensors."""

    start: int
    true: Tensor
    held: Tensor
    true_values: Tensor
    held_values: Tensor
    cached: bool


def blocks(
    query: Tensor, past: Past, current: Segment, *, scale: float, columns: int
) -> Iterator[Block]:
    """All keys, past first, ``columns`` at a time. query ``[B, Hq, M, D]``, float32 or float64."""
    heads, dtype = past.keys.shape[1], query.dtype
    rows = by_kv_head(query, heads)
    start = 0
    for segment in past.held:
        count = segment.keys.shape[2]
        for first in range(0, count, columns):
            last = min(first + columns, count)
            exact = slice(start + first, start + last)
            held = rows @ segment.keys[:, :, first:last].to(dtype).mT * scale
            for term in segment.noise:
                held = held - _bias(query, term, heads, first, last, scale)
            yield Block(
                start + first,
                rows @ past.keys[:, :, exact].to(dtype).mT * scale,
                held,
                past.values[:, :, exact].to(dtype),
                segment.values[:, :, first:last].to(dtype),
                cached=True,
            )
        start += count
    for first in range(0, current.keys.shape[2], columns):
        part = slice(first, first + columns)
        scores = rows @ current.keys[:, :, part].to(dtype).mT * scale
        values = current.values[:, :, part].to(dtype)
        yield Block(start + first, scores, scores, values, values, cached=False)


def by_kv_head(x: Tensor, heads: int) -> Tensor:
    """``[B, Hq, M, ...] -> [B, Hkv, Hq/Hkv M, ...]``."""
    return x.unflatten(1, (heads, -1)).flatten(2, 3)


def _bias(
    query: Tensor, term: ScoreNoise, heads: int, first: int, last: int, scale: float
) -> Tensor:
    """What the term subtracts, ``[B, Hkv, R, n]`` (n may be 1)."""
    weights = term.weights if term.weights.shape[2] == 1 else term.weights[:, :, first:last]
    if term.exact:
        return _exact(by_kv_head(term.query_map.mapped(query), heads), weights, term, scale)
    phi = by_kv_head(term.query_map.features(query, scale=scale), heads).to(query.dtype)
    return phi @ weights.to(query.dtype).expand(*weights.shape[:3], phi.shape[3]).mT


def _exact(mapped: Tensor, weights: Tensor, term: ScoreNoise, scale: float) -> Tensor:
    """Sum over channels of log(sinh(a)/a), a = q_c Delta_c scale / 2."""
    steps = weights.to(mapped.dtype).abs().sqrt() * (scale / 2)
    signs = torch.sign(weights).to(mapped.dtype)
    total = mapped.new_zeros(*mapped.shape[:3], weights.shape[2])
    for channel in range(mapped.shape[3]):
        group = channel // term.query_map.group_size if weights.shape[3] > 1 else 0
        a = (mapped[..., channel, None] * steps[:, :, None, :, group]).abs()
        wide = a.clamp(min=SERIES_BELOW)
        closed = wide - torch.log(2 * wide) + torch.log1p(-torch.exp(-2 * wide))
        series = a.square() / 6 - a.square().square() / 180
        total += signs[:, :, None, :, group] * torch.where(a < SERIES_BELOW, series, closed)
    return total
