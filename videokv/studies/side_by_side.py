"""A dense cache that the model attends with, and packed ones beside it that are only examined.

The rollout is that of the dense cache, so every packed cache sees the same queries, the same keys
and the same current chunk: teacher forcing. Query statistics are those of the dense run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from videokv.diagnostics import Diagnosis, Past, diagnose
from videokv.protocols import Segment

OnAttention = Callable[["Tap"], None]


@dataclass(frozen=True, eq=False)
class Tap:
    """One attention of the rollout, seen through every packed cache.

    start_token: of the current chunk; step: denoising step, from 0. query ``[B, Hq, M, D]``;
    pasts: label → the same past, exact and as that cache holds it.
    """

    start_token: int
    step: int
    layer: int
    query: Tensor
    current: Segment
    pasts: Mapping[str, Past]
    scale: float

    def diagnoses(self) -> dict[str, Diagnosis]:
        """label → what that cache does to this attention."""
        return {
            label: diagnose(self.query, past, self.current, scale=self.scale)
            for label, past in self.pasts.items()
        }


class SideBySide:
    """The world model's cache protocol over one dense and several packed caches.

    Args:
        dense: whose attention the model gets.
        packed: label → cache, empty like ``dense``.
        layers, steps: attentions that ``on_attention`` is called for; passes that write are not
            denoising steps and are never tapped, nor are those without a past.
        first_token: taps start with the chunk that begins here (after the context).
        on_attention: called with the tap.
    """

    def __init__(
        self,
        dense: Any,
        packed: Mapping[str, Any],
        *,
        layers: Collection[int],
        steps: Collection[int],
        first_token: int,
        on_attention: OnAttention,
    ) -> None:
        if not packed:
            raise ValueError("give at least one packed cache to examine")
        self.dense = dense
        self.packed = dict(packed)
        self._layers, self._steps = frozenset(layers), frozenset(steps)
        self._first_token = first_token
        self._on_attention = on_attention
        self._written: set[int] = set()
        self._seen: dict[int, int] = {}  # layer → denoising steps of this chunk so far

    def write(
        self, layer: int, start_token: int, key: Tensor, value: Tensor, query: Tensor
    ) -> None:
        """The clean rows go to every cache."""
        self._written.add(layer)
        for cache in (self.dense, *self.packed.values()):
            cache.write(layer, start_token, key, value, query)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The dense cache's attention; the others are shown to ``on_attention``."""
        if layer not in self._written:
            step = self._seen.get(layer, 0)
            self._seen[layer] = step + 1
            wanted = layer in self._layers and step in self._steps
            if wanted and self.dense.length >= self._first_token:
                # The model runs under autocast, whose bfloat16 products are too coarse to examine.
                with torch.autocast(query.device.type, enabled=False):
                    self._on_attention(self._tap(layer, step, query, Segment(key, value)))
        out: Tensor = self.dense.attend(layer, query, key, value)
        return out

    def commit(self, end_token: int) -> None:
        """Final in every cache."""
        for cache in (self.dense, *self.packed.values()):
            cache.commit(end_token)
        self._written.clear()
        self._seen.clear()

    def _tap(self, layer: int, step: int, query: Tensor, current: Segment) -> Tap:
        exact = self.dense.view(layer)
        keys = torch.cat([s.keys for s in exact], 2)
        values = torch.cat([s.values for s in exact], 2)
        pasts = {
            label: Past(keys, values, tuple(cache.view(layer)))
            for label, cache in self.packed.items()
        }
        scale = query.shape[-1] ** -0.5
        return Tap(self.dense.length, step, layer, query, current, pasts, scale)
