"""Keys that a model caches before rotary embedding: decoded, then rotated, noise and all.

Rotary embedding turns pairs of channels. A turn inside one group of channels leaves the group's
norm of the query as it is, so noise weights stay right; for noise that lives in another basis
(rotated or projected keys, groups of one channel) they would not, and such recipes are refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from videokv.adapters.rows import Piece, Pieces
from videokv.adapters.verify import RecordingCache
from videokv.cache import KVCache
from videokv.noise import ScoreNoise
from videokv.protocols import Segment


def rotated(cache: KVCache, layer: int, pieces: Pieces, rope: Callable[[Tensor], Tensor]) -> Pieces:
    """The rows ``[B, n, H, D]`` as dense pieces that went through ``rope`` together.

    rope: the model's own function of adjacent pairs (2i, 2i+1).

    Raises:
        ValueError: the noise of a cached chunk does not survive a rotation.
    """
    segments = [segment for piece in pieces for segment in _segments(cache, layer, piece)]
    turned, exact = rope(_rows(segments)), None
    if isinstance(cache, RecordingCache):
        written = [piece.without_noise() for piece in pieces]
        exact = rope(_rows([s for piece in written for s in _segments(cache.dense, layer, piece)]))
    out, at = [], 0
    for segment in segments:
        part = slice(at, at + segment.keys.shape[2])
        check_noise(segment.noise, layer=layer)
        true = None if exact is None else exact[:, part]
        out.append(Piece(part.stop - at, None, turned[:, part], segment.noise, true))
        at = part.stop
    return tuple(out)


def _rows(segments: list[Segment]) -> Tensor:
    """Their keys ``[B, n, H, D]``."""
    return torch.cat([segment.keys for segment in segments], 2).transpose(1, 2)


def check_noise(noise: tuple[ScoreNoise, ...], *, layer: int) -> None:
    """Raise ValueError where rotating adjacent pairs of channels would change the correction."""
    for term in noise:
        kind = term.query_map
        if kind.transform is not None or kind.basis is not None:
            raise ValueError(
                f"layer {layer} caches keys before rotary embedding: a correction in a rotated or "
                "projected basis is not exact there; use a recipe without rotation and without "
                "psac, or one without correction"
            )
        if kind.group_size % 2 or kind.power != 2 or term.exact:
            raise ValueError(
                f"layer {layer} caches keys before rotary embedding: only sums of squares over "
                f"groups of whole pairs are exact there, got groups of {kind.group_size} channels; "
                "use correction 'taylor', 'measured' or none, with groups along channels"
            )


def _segments(cache: KVCache, layer: int, piece: Piece) -> list[Segment]:
    if piece.dense is not None:
        rows = piece.dense.transpose(1, 2)
        return [Segment(rows, rows, piece.noise)]
    if piece.token is None:
        raise ValueError(f"layer {layer}: {piece.count} rows were read but never written")
    span = (piece.token, piece.token + piece.count)
    return cache.view(layer, [span], tail=span[1] > cache.length)
