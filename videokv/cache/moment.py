"""The running second moment of queries that query-aware quantizers look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from videokv.protocols import Correction, Quantizer


@dataclass(frozen=True, eq=False)
class QueryMoment:
    """mean: ``[B, Hkv, D, D]`` float32, mean of q q^T over ``count`` queries of each KV head."""

    mean: Tensor
    count: int


def updated(moment: QueryMoment | None, queries: Tensor, *, kv_heads: int) -> QueryMoment:
    """The moment with queries ``[B, Hq, T, D]`` added, the query heads of a KV head pooled."""
    pooled = queries.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [B, Hkv, n, D]
    fresh = pooled.shape[2]
    total = _squares(pooled)
    if moment is None:
        return QueryMoment(total / fresh, fresh)
    count = moment.count + fresh
    mean = torch.lerp(moment.mean, total / fresh, fresh / count)
    return QueryMoment(mean, count)


def reads_queries(method: Quantizer | Correction | None) -> bool:
    """Whether a quantizer looks at ``EncodeContext.query_moment`` or the fit of a correction at its
    queries: all but those that say no."""
    return method is not None and getattr(method, "reads_queries", True)


def _squares(rows: Tensor) -> Tensor:
    """Sum of x x^T over rows ``[B, H, n, D]``: ``[B, H, D, D]`` float32.

    On GPUs 16-bit rows go to the tensor cores: their products are exact in float32, which is also
    what the sum is kept in.
    """
    if rows.device.type != "cuda" or rows.dtype not in (torch.float16, torch.bfloat16):
        rows = rows.float()
        return rows.transpose(-1, -2) @ rows
    flat = rows.flatten(0, 1)
    total = torch.bmm(flat.transpose(-1, -2), flat, out_dtype=torch.float32)
    return total.unflatten(0, rows.shape[:2])
