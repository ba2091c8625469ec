"""One attention map and the tokens that queries select, small enough to keep and to draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from videokv.diagnostics.scores import Past, blocks
from videokv.noise import ScoreNoise
from videokv.protocols import Segment
from videokv.studies.side_by_side import Tap

BINS = 48  # rows and, for each part, columns of the map


def attention_map(tap: Tap, *, head: int = 0) -> dict[str, Any]:
    """label → mean attention by bins of queries and keys, of one head of the first clip.

    Also ``"exact"``. cached_bins: columns left of the border between cached and current keys.
    selected: label → the cached token with the largest score, of each query.
    """
    query = tap.query[:1].to(torch.promote_types(tap.query.dtype, torch.float32))
    found: dict[str, Any] = {"layer": tap.layer, "step": tap.step, "head": head}
    maps: dict[str, Any] = {}
    selected: dict[str, list[int]] = {}
    masses: dict[str, float] = {}
    for label, past in tap.pasts.items():
        true, held = _scores(query, _first(past), tap, head)
        sides = {"exact": true, label: held} if "exact" not in maps else {label: held}
        for name, scores in sides.items():
            p = scores.softmax(-1)
            maps[name] = _binned(p, past.tokens).tolist()
            masses[name] = float(p[:, : past.tokens].sum(-1).mean())
            selected[name] = scores[:, : past.tokens].argmax(-1).tolist()
        found["cached_tokens"] = past.tokens
        found["cached_bins"] = min(BINS, past.tokens)
    return {**found, "maps": maps, "masses": masses, "selected": selected}


def _first(past: Past) -> Past:
    """The first clip of the batch (what the clips share, stays)."""
    held = tuple(
        Segment(s.keys[:1], s.values[:1], tuple(_first_noise(term) for term in s.noise))
        for s in past.held
    )
    return Past(past.keys[:1], past.values[:1], held)


def _first_noise(term: ScoreNoise) -> ScoreNoise:
    basis = term.query_map.basis
    query_map = replace(term.query_map, basis=None if basis is None else basis[:1])
    return replace(term, weights=term.weights[:1], query_map=query_map)


def _scores(query: Tensor, past: Past, tap: Tap, head: int) -> tuple[Tensor, Tensor]:
    """Exact and held scores ``[M, T]`` of one query head."""
    current = Segment(tap.current.keys[:1], tap.current.values[:1])
    heads, per_kv = past.keys.shape[1], query.shape[1] // past.keys.shape[1]
    parts = list(blocks(query, past, current, scale=tap.scale, columns=1 << 20))

    def of_head(x: Tensor) -> Tensor:
        return x[0].reshape(heads * per_kv, query.shape[2], -1)[head]

    true = torch.cat([of_head(part.true) for part in parts], -1)
    return true, torch.cat([of_head(part.held) for part in parts], -1)


def _binned(p: Tensor, cached: int) -> Tensor:
    """Mean of ``[M, T]`` in at most BINS rows and BINS columns on each side of the border."""
    pool = torch.nn.functional.adaptive_avg_pool2d
    rows = min(BINS, p.shape[0])
    sides = [side for side in (p[:, :cached], p[:, cached:]) if side.shape[1]]
    return torch.cat([pool(s[None], (rows, min(BINS, s.shape[1])))[0] for s in sides], 1)
