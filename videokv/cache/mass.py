"""How much attention goes to cached keys, read off log-sum-exps while the model runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MassCall:
    """One attention over a non-empty cache.

    start_token: first token of the current chunk. written: the pass had written its rows before (a
    clean pass, or a prefill); denoising passes have not. mass: ``[B]`` float32, mean over heads and
    queries.
    """

    start_token: int
    layer: int
    written: bool
    mass: Tensor


@dataclass(frozen=True)
class Mass:
    """Mean attention mass on cached keys, between 0 and 1.

    layers: mean of each layer. mean: over all calls. steps: for each pass through the model, in
    order, the mean over its layers.
    """

    layers: dict[int, float]
    mean: float
    steps: tuple[float, ...]


def cached_mass(lse_current: Tensor, lse_total: Tensor) -> Tensor:
    """``[B]``: mean of 1 - exp(lse_current - lse_total) over ``[B, Hq, M]``."""
    share = -torch.expm1(lse_current.float() - lse_total.float())
    return share.clamp(0, 1).mean((1, 2))


def summary(calls: list[MassCall]) -> Mass:
    """Means of recorded calls. Synchronises once.

    Raises:
        ValueError: there are none.
    """
    if not calls:
        raise ValueError(
            "no attention mass was recorded: make the cache with record_mass=True and attend "
            "after a commit"
        )
    values = torch.stack([call.mass.mean().cpu() for call in calls]).tolist()
    layers: dict[int, list[float]] = {}
    steps: list[dict[int, float]] = []
    for call, value in zip(calls, values, strict=True):
        layers.setdefault(call.layer, []).append(value)
        if not steps or call.layer in steps[-1]:
            steps.append({})
        steps[-1][call.layer] = value
    return Mass(
        layers={layer: _mean(found) for layer, found in sorted(layers.items())},
        mean=_mean(values),
        steps=tuple(_mean(list(step.values())) for step in steps),
    )


def combined(masses: Iterable[Mass]) -> Mass:
    """Several caches that made as many passes (the branches of a guided model), as one.

    Steps come one branch after the other.
    """
    parts = list(masses)
    if len(parts) == 1:
        return parts[0]
    layers = sorted({layer for part in parts for layer in part.layers})
    return Mass(
        layers={
            layer: _mean([part.layers[layer] for part in parts if layer in part.layers])
            for layer in layers
        },
        mean=_mean([part.mean for part in parts]),
        steps=tuple(step for part in parts for step in part.steps),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
