"""The running second moment of queries that query-aware quantizers look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class QueryMoment:
    """mean: ``[B, Hkv, D, D]`` float32, mean of q q^T over ``count`` queries of each KV head."""

    mean: Tensor
    count: int


def updated(moment: QueryMoment | None, queries: Tensor, *, kv_heads: int) -> QueryMoment:
    """The moment with queries ``[B, Hq, T, D]`` added, the query heads of a KV head pooled."""
    pooled = queries.unflatten(1, (kv_heads, -1)).flatten(2, 3).float()  # [B, Hkv, n, D]
    fresh = pooled.shape[2]
    total = pooled.transpose(-1, -2) @ pooled
    if moment is None:
        return QueryMoment(total / fresh, fresh)
    count = moment.count + fresh
    mean = torch.lerp(moment.mean, total / fresh, fresh / count)
    return QueryMoment(mean, count)
