"""Clustered tokens as they are stored: one byte of label a token, BF16 centroids."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from videokv.kernels.assign_centroids.reference import cluster_offsets


@dataclass(frozen=True, eq=False)
class Clusters:
    """ids uint8 ``[B, H, T]`` into table bfloat16 ``[B, H, K, D]``."""

    ids: Tensor
    table: Tensor

    def gather(self) -> Tensor:
        """The centroid of every token, float32 ``[B, H, T, D]``."""
        return gather_centroids(self.table, self.ids)


def gather_centroids(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of ``[B, H, K, D]`` by labels ``[B, H, T]`` (any integer dtype), float32."""
    clusters, size = table.shape[2:]
    rows = (ids.int() + cluster_offsets(ids, clusters).int()).reshape(-1)
    found = table.float().reshape(-1, size).index_select(0, rows)
    return found.reshape(*ids.shape, size)
