"""k-means in PyTorch: distances as matrix products, means by a fixed order of additions."""

from __future__ import annotations

import torch
from torch import Tensor

# Largest block of token-to-centroid scores held at once (float32 elements: 16 MiB).
BLOCK_SCORES = 1 << 22


def cluster(x: Tensor, start: Tensor, *, iterations: int) -> tuple[Tensor, Tensor]:
    """See the package: x float32 ``[B, H, T, D]``, start float32 ``[B, H, K, D]``."""
    origin = x.mean(2, keepdim=True)
    tokens, centroids = x - origin, start - origin
    for _ in range(iterations):
        ids = _nearest_centred(tokens, centroids, count=1)[..., 0]
        centroids = means(tokens, ids, centroids)
    return ids.to(torch.uint8), centroids + origin


def nearest(x: Tensor, centroids: Tensor, *, count: int) -> Tensor:
    """See the package: float32 tensors, int64 labels ``[B, H, T, count]``."""
    # |x - mu|^2 is found as |mu|^2 - 2 x mu: moved to the tokens' mean first, because a common
    # offset (a key bias of several hundred) would leave no digits of the difference.
    origin = x.mean(2, keepdim=True)
    return _nearest_centred(x - origin, centroids - origin, count=count)


def _nearest_centred(x: Tensor, centroids: Tensor, *, count: int) -> Tensor:
    batch, heads, length, size = x.shape
    tokens = x.reshape(batch * heads, length, size)
    table = centroids.reshape(batch * heads, -1, size)
    half_norms = (table.square().sum(-1) / 2)[:, None, :]  # [BH, 1, K]
    block = max(1, BLOCK_SCORES // (tokens.shape[0] * table.shape[1]))
    labels = [
        _smallest(torch.baddbmm(half_norms, part, table.mT, alpha=-1), count)
        for part in tokens.split(block, dim=1)
    ]
    return torch.cat(labels, dim=1).reshape(batch, heads, length, count)


def _smallest(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` smallest scores, ties to the lower (topk promises none)."""
    found = []
    for _ in range(count - 1):
        found.append(scores.argmin(-1, keepdim=True))
        scores = scores.scatter(-1, found[-1], torch.inf)
    return torch.cat([*found, scores.argmin(-1, keepdim=True)], dim=-1)


def means(x: Tensor, ids: Tensor, fallback: Tensor) -> Tensor:
    """Mean of the tokens of each label ``[B, H, K, D]``; labels without tokens keep ``fallback``.

    x float32 ``[B, H, T, D]``; ids int64 ``[B, H, T]``; fallback ``[B, H, K, D]``.
    """
    batch, heads, clusters, size = fallback.shape
    groups = batch * heads * clusters
    flat_ids = (ids + cluster_offsets(ids, clusters)).reshape(-1)
    sums = _sums(x.reshape(-1, size), flat_ids, groups).reshape(fallback.shape)
    counts = x.new_zeros(groups).index_add_(0, flat_ids, x.new_ones(()).expand(len(flat_ids)))
    counts = counts.reshape(batch, heads, clusters, 1)  # below 2^24: exact in any order
    return torch.where(counts > 0, sums / counts.clamp(min=1), fallback)


def cluster_offsets(ids: Tensor, clusters: int) -> Tensor:
    """What to add to labels ``[B, H, T]`` so that they index rows of ``[B * H * K, D]``."""
    batch, heads, _ = ids.shape
    return torch.arange(batch * heads, device=ids.device).reshape(batch, heads, 1) * clusters


def _sums(rows: Tensor, groups: Tensor, count: int) -> Tensor:
    """Sum of the rows ``[N, D]`` of each group, added in the order of the tokens."""
    if rows.device.type == "cpu":
        return rows.new_zeros(count, rows.shape[1]).index_add_(0, groups, rows)
    # index_add adds in any order on a GPU: sort by group instead, each group is one segment.
    ordered, order = torch.sort(groups, stable=True)
    edges = torch.searchsorted(ordered, torch.arange(count + 1, device=rows.device))
    return torch.segment_reduce(
        rows.index_select(0, order), "sum", lengths=edges.diff(), unsafe=True, initial=0.0
    )
