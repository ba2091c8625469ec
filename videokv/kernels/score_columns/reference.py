"""The same in PyTorch steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from videokv.kernels.score_columns.placement import Placement
from videokv.noise import QueryMap


def widen_query(
    query: Tensor,
    maps: Sequence[QueryMap],
    *,
    scale: float,
    width: int,
    bases: Tensor | None = None,
) -> Tensor:
    """See the package; the maps' own bases are used."""
    head_dim = query.shape[3]
    wide = query.new_zeros(*query.shape[:3], width)
    wide[..., :head_dim] = query
    if maps:
        columns = query_columns(query, maps, scale=scale)
        wide[..., head_dim : head_dim + columns.shape[3]] = columns
    return wide


def query_columns(query: Tensor, maps: Sequence[QueryMap], *, scale: float) -> Tensor:
    """-phi/scale ``[B, Hq, M, F]``, at least float32."""
    features = [m.features(query, scale=scale) for m in maps]
    phi = features[0] if len(features) == 1 else torch.cat(features, -1)
    return phi * (-1 / scale)


def place_key_columns(out: Tensor, placement: Placement) -> None:
    """See the package."""
    out.zero_()
    row = 0
    for part, source in zip(placement.parts, placement.weights, strict=True):
        for first, origin, count in part.blocks:
            assert source is not None
            rows = out[:, :, row : row + part.tokens, first : first + count]
            rows.copy_(source[..., origin : origin + count])
        row += part.tokens


def fill_key_columns(out: Tensor, blocks: Sequence[tuple[int, Tensor]]) -> None:
    """See the package."""
    out.zero_()
    for first, weights in blocks:
        out[..., first : first + weights.shape[3]] = weights
