"""Keys that a model caches before rotary embedding: decoded, then rotated, noise and all.

Rotary embedding turns pairs of channels. A turn inside one group of channels leaves the group's
norm of the query as it is, so noise weights stay right; for noise that lives in another basis
(rotated or projected keys, groups of one channel) they would not, and such recipes are refused.

On a GPU packed keys are turned in the same pass that decodes them, by the cosines and sines that
the model's own function gives: written once instead of read, widened and written again. The product
is then float32, rounded once. Where nothing is packed the model's function turns the rows itself,
so that ``bf16`` has its bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from videokv.adapters.rows import Piece, Pieces, length
from videokv.adapters.verify import RecordingCache
from videokv.cache import KVCache
from videokv.cache.rows import worth_gathering
from videokv.cache.state import Layout
from videokv.kernels.reconstruct import Rope
from videokv.noise import ScoreNoise
from videokv.protocols import Segment


def rotated(cache: KVCache, layer: int, pieces: Pieces, rope: Callable[[Tensor], Tensor]) -> Pieces:
    """The rows ``[B, n, H, D]`` as dense pieces that went through ``rope`` together.

    rope: the model's own function of adjacent pairs (2i, 2i+1).

    Raises:
        ValueError: the noise of a cached chunk does not survive a rotation.
    """
    fused = cache.recipe.keys is not None and any(piece.token is not None for piece in pieces)
    if fused and not isinstance(cache, RecordingCache):
        layout = cache.layer_states()[layer].layout
        if layout is not None and worth_gathering(layout.device):
            return _turned_as_read(cache, layer, pieces, rope, layout)
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


def table_of(
    rope: Callable[[Tensor], Tensor],
    *,
    batch: int,
    tokens: int,
    head_dim: int,
    device: torch.device,
) -> Rope:
    """Cosines and sines ``[B, tokens, D / 2]`` that a function of adjacent pairs multiplies by.

    Found from what it makes of (1, 0) in every pair of one head.
    """
    unit = torch.zeros(batch, tokens, 1, head_dim, device=device)
    unit[..., 0::2] = 1
    cos, sin = rope(unit)[:, :, 0].float().unflatten(-1, (-1, 2)).unbind(-1)
    return Rope(cos.contiguous(), sin.contiguous())


def _turned_as_read(
    cache: KVCache, layer: int, pieces: Pieces, rope: Callable[[Tensor], Tensor], layout: Layout
) -> Pieces:
    """``rotated`` with one pass over packed keys; values are not decoded for it."""
    table = table_of(
        rope,
        batch=layout.batch,
        tokens=length(pieces),
        head_dim=layout.key_dim,
        device=layout.device,
    )
    out, at = [], 0
    for piece in pieces:
        turn = table.rows(at, at + piece.count)
        at += piece.count
        if piece.dense is not None:
            rows = turn.turn(piece.dense.transpose(1, 2)).transpose(1, 2)
            check_noise(piece.noise, layer=layer)
            out.append(Piece(piece.count, dense=rows, noise=piece.noise))
            continue
        span = _span(piece, layer)
        for keys, noise in cache.side(layer, "key", span, rope=turn, tail=span[1] > cache.length):
            check_noise(noise, layer=layer)
            out.append(Piece(keys.shape[2], dense=keys.transpose(1, 2), noise=noise))
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
    span = _span(piece, layer)
    return cache.view(layer, [span], tail=span[1] > cache.length)


def _span(piece: Piece, layer: int) -> tuple[int, int]:
    """The tokens of a piece that lies in the cache."""
    if piece.token is None:
        raise ValueError(f"layer {layer}: {piece.count} rows were read but never written")
    return piece.token, piece.token + piece.count
