"""Where k-means starts: random tokens, k-means++, or the labels of the chunk before.

Random numbers come from a generator of our own and are the same for every row and head, so a row
of a batch, or a head on another rank, gets what it would get alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.kernels.assign_centroids.reference import means

TOKENS_PER_CENTROID = 16  # k-means++ draws among so many evenly spaced tokens a centroid


def draw_tokens(x: Tensor, *, count: int, seed: int) -> Tensor:
    """``count`` tokens of ``[B, H, T, D]``, drawn with replacement (as Quant-VideoGen does)."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, x.shape[2], (count,), generator=generator)
    return x.index_select(2, picks.to(x.device))


def spread_tokens(x: Tensor, *, count: int, seed: int) -> Tensor:
    """k-means++ (Arthur and Vassilvitskii, 2007): each next centroid is a token drawn with a
    probability proportional to its squared distance from those already drawn.

    x: ``[B, H, T, D]`` finite. Returns float32 ``[B, H, count, D]``.
    """
    tokens = _evenly_spaced(x, limit=TOKENS_PER_CENTROID * count).float()
    draws = uniforms(count, seed)
    first = int(draws[0] * tokens.shape[2])
    chosen = [tokens[:, :, first : first + 1]]
    distances = _squared_distances(tokens, chosen[0])
    for uniform in draws[1:]:
        chosen.append(_draw(tokens, distances, uniform))
        distances = torch.minimum(distances, _squared_distances(tokens, chosen[-1]))
    return torch.cat(chosen, dim=2)


def draw_error(x: Tensor, found: Tensor, *, seed: int) -> float:
    """How far the draws of ``spread_tokens`` miss the rows ``found`` ``[B, H, count, D]``, as a
    share of the sum that they are drawn from; infinite where a row is none of the tokens.

    In float64, each draw after the rows before it. For checks: tokens should differ.
    """
    count = found.shape[2]
    tokens = _evenly_spaced(x, limit=TOKENS_PER_CENTROID * count).double()
    draws = uniforms(count, seed)
    length = tokens.shape[2]
    weights = tokens.new_ones(tokens.shape[:3])  # of the first draw: all alike
    smallest = tokens.new_full(tokens.shape[:3], torch.inf)
    goals = [int(draws[0] * length) / length, *draws[1:]]
    worst = 0.0
    for goal, row in zip(goals, found.double().unbind(2), strict=True):
        distances = _squared_distances(tokens, row.unsqueeze(2))
        least, place = distances.min(-1, keepdim=True)
        if bool((least != 0).any()):
            return float("inf")
        sums = weights.cumsum(-1)
        whole = sums[..., -1:].clamp(min=torch.finfo(torch.float64).tiny)
        end = sums.gather(-1, place) / whole
        begin = end - weights.gather(-1, place) / whole
        worst = max(worst, float(torch.maximum(begin - goal, goal - end).amax()))
        weights = smallest = torch.minimum(smallest, distances)
    return worst


def uniforms(count: int, seed: int) -> list[float]:
    """The numbers in 0..1 that k-means++ draws its tokens with."""
    generator = torch.Generator().manual_seed(seed)
    found: list[float] = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    return found


def label_means(x: Tensor, ids: Tensor, *, fallback: Tensor) -> Tensor:
    """Means of the new tokens under the labels that the tokens at the same places had before.

    x ``[B, H, T, D]``; ids uint8 ``[B, H, T]``; fallback ``[B, H, K, D]`` for unused labels.
    """
    if ids.shape != x.shape[:3]:
        raise ValueError(f"labels {tuple(ids.shape)} do not match tokens {tuple(x.shape)}")
    return means(x.float(), ids.long(), fallback.float())


def _evenly_spaced(x: Tensor, *, limit: int) -> Tensor:
    length = x.shape[2]
    if length <= limit:
        return x
    return x.index_select(2, torch.arange(limit, device=x.device) * length // limit)


def _squared_distances(tokens: Tensor, centre: Tensor) -> Tensor:
    """``[B, H, T]``; by differences, so that equal tokens are exactly 0 apart."""
    return (tokens - centre).square_().sum(-1)


def _draw(tokens: Tensor, distances: Tensor, uniform: float) -> Tensor:
    """One token of each head ``[B, H, 1, D]``, with probability proportional to its distance."""
    # Integers add up to the same sum in any order; floats would not on a GPU. The largest distance
    # becomes 2^40, so the sum over 2^12 tokens stays exact.
    largest = distances.amax(-1, keepdim=True).double()
    unit = torch.where(largest > 0, 2.0**40 / largest, torch.zeros_like(largest))
    steps = (distances.double() * unit).long().cumsum(-1)
    goal = (steps[..., -1:].double() * uniform).long() + 1
    # Where all tokens are drawn already (all sums zero) the search runs off the end: take the last.
    place = torch.searchsorted(steps, goal).clamp(max=tokens.shape[2] - 1)
    return tokens.gather(2, place[..., None].expand(-1, -1, -1, tokens.shape[3]))
