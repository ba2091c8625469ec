"""Self-test of a rollout: one step of attention on the packed history against the dense one.

``verify`` is the comparison. ``RecordingCache`` keeps what it needs: beside the packed chunks a
dense copy of everything written, and the last queries, keys and values of each layer. That costs
more memory than no cache compression at all, so it is for short runs.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from videokv.attention import attend
from videokv.cache import KVCache
from videokv.protocols import Segment
from videokv.recipes import Recipe

USUAL_FACTOR = 3.0
SMALLEST_TOLERANCE = 0.01


@dataclass(frozen=True)
class LayerCheck:
    """error: norm of the output's error over the norm of the dense output. ok: at most tolerance.

    tokens: length of the history that was read.
    """

    layer: int
    error: float
    tolerance: float
    tokens: int

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        word = "ok" if self.ok else f"BAD, above {self.tolerance:.3g}"
        return f"layer {self.layer}: error {self.error:.3g} over {self.tokens} tokens ({word})"


@torch.no_grad()
def verify(
    cache: KVCache,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dense_keys: Tensor,
    dense_values: Tensor,
    tolerance: float,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> LayerCheck:
    """One step on the history of ``cache`` against the same step on the true history.

    query ``[B, Hq, M, D]``, key ``[B, Hkv, N, D]``, value ``[B, Hkv, N, Dv]``: the current rows.
    dense_keys, dense_values ``[B, Hkv, T, D or Dv]``: the history as it was written. The dense
    step runs in float32 (float64 for float64 rows). Nothing of the cache changes.

    Raises:
        ValueError: the history held has another length than the dense one, or the tolerance is not
            positive.
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    history = cache.view(layer)
    held = sum(segment.keys.shape[2] for segment in history)
    if held != dense_keys.shape[2]:
        raise ValueError(
            f"layer {layer} holds {held} tokens, dense_keys has {dense_keys.shape[2]}; give the "
            "history that the cache was written with, less what it dropped"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found, _ = cache.recipe.attend(
        query, [*history, Segment(key, value)], scale=scale, causal=causal, need_lse=False
    )
    wide = torch.promote_types(query.dtype, torch.float32)
    past = Segment(dense_keys.to(wide), dense_values.to(wide))
    current = Segment(key.to(wide), value.to(wide))
    true, _ = attend(query.to(wide), [past, current], scale=scale, causal=causal)
    return LayerCheck(layer, _relative_error(found.to(wide), true), tolerance, held)


@dataclass(frozen=True, eq=False)
class Step:
    """The arguments of an attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None
    causal: bool


class RecordingCache(KVCache):
    """A KVCache that remembers the true history and each layer's last step, for ``check``."""

    def __init__(self, recipe: Recipe, **options: Any) -> None:
        super().__init__(recipe, **options)
        plain = dataclasses.replace(recipe, keys=None, values=None, correction=None)
        self._dense = KVCache(plain, layers=options.get("layers"))
        self._steps: dict[int, Step] = {}

    def write(
        self,
        layer: int,
        start_token: int,
        key: Tensor,
        value: Tensor,
        query: Tensor | None = None,
    ) -> None:
        super().write(layer, start_token, key, value, query)
        self._dense.write(layer, start_token, key, value)

    def commit(self, end_token: int) -> None:
        super().commit(end_token)
        self._dense.commit(end_token)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        *,
        causal: bool = False,
    ) -> Tensor:
        output = super().attend(layer, query, key, value, scale, causal=causal)
        if self.visible_tokens:
            query, key, value = (t.detach().clone() for t in (query, key, value))
            self._steps[layer] = Step(query, key, value, scale, causal)
        return output

    def reset(self, *, keep_statistics: bool = False) -> None:
        super().reset(keep_statistics=keep_statistics)
        self._dense.reset()
        self._steps = {}

    def crop(self, length: int, *, decode_partial: bool = False) -> None:
        super().crop(length, decode_partial=decode_partial)
        self._dense.crop(length)

    def forget(self, before_token: int) -> None:
        super().forget(before_token)
        self._dense.forget(before_token)

    def select_batch(self, index: Tensor | Sequence[int]) -> None:
        super().select_batch(index)
        self._dense.select_batch(index)
        self._steps = {}

    def restore(self, states: dict[int, Any], *, length: int) -> None:
        raise ValueError("a cache that records for verify() starts empty; load into another one")

    def to(self, device: torch.device | str) -> RecordingCache:
        super().to(device)
        self._dense.to(device)
        self._steps = {}
        return self

    def check(self, tolerance: float | None = None) -> tuple[LayerCheck, ...]:
        """``verify`` for the last step of every layer, on the history as it is now.

        tolerance: None takes three times the median error of the layers, at least 1 %: the layers
        that stand out are bad.

        Raises:
            ValueError: no step was recorded on a history.
        """
        if not self._steps or not self.visible_tokens:
            raise ValueError("verify() needs a step on a history; run the model for two chunks")
        checks = [
            self._checked(layer, step, tolerance or math.inf)
            for layer, step in sorted(self._steps.items())
        ]
        if tolerance is None:
            usual = USUAL_FACTOR * statistics.median(check.error for check in checks)
            limit = max(SMALLEST_TOLERANCE, usual)
            checks = [dataclasses.replace(check, tolerance=limit) for check in checks]
        return tuple(checks)

    def _checked(self, layer: int, step: Step, tolerance: float) -> LayerCheck:
        history = self._dense.view(layer)
        return verify(
            self,
            layer,
            step.query,
            step.key,
            step.value,
            torch.cat([segment.keys for segment in history], 2),
            torch.cat([segment.values for segment in history], 2),
            tolerance,
            scale=step.scale,
            causal=step.causal,
        )


def bad_layers(checks: Iterable[LayerCheck]) -> list[int]:
    """The layers whose error is above their tolerance."""
    return [check.layer for check in checks if not check.ok]


def _relative_error(found: Tensor, true: Tensor) -> float:
    """Infinite where anything is not finite."""
    error = float((found - true).norm()) / max(float(true.norm()), 1e-30)
    return error if math.isfinite(error) else math.inf
