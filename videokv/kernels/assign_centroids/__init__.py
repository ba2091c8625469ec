"""Batched k-means of the tokens of a chunk: every (batch row, head) is clustered by itself.

Deterministic: the same input gives the same labels and centroids on any number of threads and on
every run, and a row of a batch never sees another row. The number of iterations is fixed, so
nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.kernels.assign_centroids import reference
from videokv.kernels.assign_centroids.layout import Clusters, gather_centroids
from videokv.kernels.assign_centroids.starts import (
    draw_tokens,
    label_means,
    spread_tokens,
)

__all__ = [
    "MAX_CENTROIDS",
    "Clusters",
    "cluster",
    "draw_tokens",
    "gather_centroids",
    "label_means",
    "nearest",
    "spread_tokens",
]

MAX_CENTROIDS = 256  # labels are stored in one byte


def cluster(x: Tensor, start: Tensor, *, iterations: int) -> tuple[Tensor, Tensor]:
    """Lloyd's k-means from the given centroids.

    x: ``[B, H, T, D]`` finite, any floating dtype; start: ``[B, H, K, D]``, K <= 256.
    Returns labels uint8 ``[B, H, T]`` and centroids float32 ``[B, H, K, D]``. The labels are those
    that the last centroids are the means of, so the residuals of a cluster sum to zero. A cluster
    without tokens keeps its centroid.
    """
    _check(x, start)
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    return reference.cluster(x.float(), start.float(), iterations=iterations)


def nearest(x: Tensor, centroids: Tensor, *, count: int = 1) -> Tensor:
    """The ``count`` nearest centroids of each token, nearest first, ties to the lower label.

    x: ``[B, H, T, D]``; centroids: ``[B, H, K, D]``. Returns int64 ``[B, H, T, count]``.
    """
    _check(x, centroids)
    if not 1 <= count <= centroids.shape[2]:
        raise ValueError(f"count must be 1..{centroids.shape[2]} (centroids), got {count}")
    return reference.nearest(x.float(), centroids.float(), count=count)


def _check(x: Tensor, centroids: Tensor) -> None:
    if x.ndim != 4 or centroids.ndim != 4 or x.shape[2] < 1:
        raise ValueError(
            "expected tokens [B, H, T, D] with T >= 1 and centroids [B, H, K, D], "
            f"got {tuple(x.shape)} and {tuple(centroids.shape)}"
        )
    if x.shape[:2] != centroids.shape[:2] or x.shape[3] != centroids.shape[3]:
        raise ValueError(
            "tokens and centroids must agree in batch, heads and head size, "
            f"got {tuple(x.shape)} and {tuple(centroids.shape)}"
        )
    if not 1 <= centroids.shape[2] <= MAX_CENTROIDS:
        raise ValueError(
            f"centroids must be 1..{MAX_CENTROIDS} (labels are one byte), got {centroids.shape[2]}"
        )
    if not (torch.is_floating_point(x) and torch.is_floating_point(centroids)):
        raise ValueError(f"expected floating tensors, got {x.dtype} and {centroids.dtype}")
