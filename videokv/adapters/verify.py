"""Self-test of a rollout: steps of attention on the packed history against the dense one.

``RecordingCache`` keeps a dense copy of everything written beside the packed chunks and runs every
step of attention on both. That takes more memory and time than no compression at all, so it is for
short runs. ``Compressed.verify`` tells what the last step of each layer gave.
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

from videokv.cache import KVCache
from videokv.recipes import Recipe

USUAL_FACTOR = 3.0
SMALLEST_TOLERANCE = 0.01


@dataclass(frozen=True)
class LayerCheck:
    """error: norm of the output's error over the norm of the dense output. ok: at most tolerance.

    tokens: length of the history that was read. branch: number of the guidance branch, or of the
    row of a padded batch.
    """

    layer: int
    error: float
    tolerance: float
    tokens: int
    branch: int = 0

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        word = "ok" if self.ok else f"BAD, above {self.tolerance:.3g}"
        return f"layer {self.layer}: error {self.error:.3g} over {self.tokens} tokens ({word})"


class RecordingCache(KVCache):
    """A KVCache beside a dense one, ``dense``, and each layer's error of the last step."""

    def __init__(self, recipe: Recipe, **options: Any) -> None:
        super().__init__(recipe, **options)
        plain = dataclasses.replace(recipe, keys=None, values=None, correction=None)
        self.dense = KVCache(plain, layers=options.get("layers"))
        self._errors: dict[int, tuple[float, int]] = {}

    def write(
        self,
        layer: int,
        start_token: int,
        key: Tensor,
        value: Tensor,
        query: Tensor | None = None,
    ) -> None:
        super().write(layer, start_token, key, value, query)
        self.dense.write(layer, start_token, key, value)

    def commit(self, end_token: int) -> None:
        super().commit(end_token)
        self.dense.commit(end_token)

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
        true = self.dense.attend(layer, query, key, value, scale, causal=causal)
        self.compare(layer, output, true)
        return output

    def compare(self, layer: int, found: Tensor, true: Tensor) -> None:
        """Note a step: what attention gave on the packed and on the dense history."""
        if self.visible_tokens:
            self._errors[layer] = (relative_error(found, true), self.visible_tokens)

    def reset(self, *, keep_statistics: bool = False) -> None:
        super().reset(keep_statistics=keep_statistics)
        self.dense.reset()
        self._errors = {}

    def crop(self, length: int, *, decode_partial: bool = False) -> None:
        super().crop(length, decode_partial=decode_partial)
        self.dense.crop(length)

    def forget(self, before_token: int) -> None:
        super().forget(before_token)
        self.dense.forget(before_token)

    def keep(self, layer: int, ranges: Sequence[tuple[int, int]]) -> None:
        super().keep(layer, ranges)
        self.dense.keep(layer, ranges)

    def select_batch(self, index: Tensor | Sequence[int]) -> None:
        super().select_batch(index)
        self.dense.select_batch(index)

    def restore(self, states: dict[int, Any], *, length: int) -> None:
        if length:
            raise ValueError(
                "a cache that records for verify() starts empty; load into another one"
            )
        super().restore(states, length=length)
        self.dense.reset()

    def to(self, device: torch.device | str) -> RecordingCache:
        super().to(device)
        self.dense.to(device)
        return self

    def check(self, tolerance: float | None = None, *, branch: int = 0) -> tuple[LayerCheck, ...]:
        """The last step of every layer that read a history; none where there was none.

        tolerance: None takes three times the median error of the layers, at least 1 %: the layers
            that stand out are bad.

        Raises:
            ValueError: the tolerance is not positive.
        """
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance must be positive, got {tolerance}")
        if tolerance is None and self._errors:
            usual = statistics.median(error for error, _ in self._errors.values())
            tolerance = max(SMALLEST_TOLERANCE, USUAL_FACTOR * usual)
        return tuple(
            LayerCheck(layer, error, tolerance or math.inf, tokens, branch)
            for layer, (error, tokens) in sorted(self._errors.items())
        )


def bad_layers(checks: Iterable[LayerCheck]) -> list[int]:
    """The layers whose error is above their tolerance."""
    return [check.layer for check in checks if not check.ok]


def relative_error(found: Tensor, true: Tensor) -> float:
    """Norm of the difference over the norm of ``true``; infinite where anything is not finite."""
    found, true = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (found, true))
    error = float((found - true).norm()) / max(float(true.norm()), 1e-30)
    return error if math.isfinite(error) else math.inf
