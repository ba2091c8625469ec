"""The same written out in float32 (float64 for float64 queries)."""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.kernels.attend.call import Call, Rows
from videokv.tensors import E4M3, E4M3_MAX


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """See the package; materialises the scores. Softmax weights are never rounded."""
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    query = call.query.to(dtype)
    scores, values = [], []
    if call.past is not None:
        keys, wide = _widened(call.past, dtype)
        past = _grouped(_rounded(query) if call.past.keys.dtype == E4M3 else query, keys.mT)
        if call.extra_query is not None and call.extra_keys is not None:
            past = past + _grouped(call.extra_query.to(dtype), call.extra_keys.to(dtype).mT)
        scores.append(past)
        values.append(wide)
    if call.current is not None:
        keys, wide = _widened(call.current, dtype)
        current = _grouped(query, keys.mT)
        if call.causal:
            hidden = torch.ones_like(current[0, 0], dtype=torch.bool).triu(1)
            current = current.masked_fill(hidden, -torch.inf)
        scores.append(current)
        values.append(wide)
    joined = torch.cat(scores, -1) * call.scale
    lse = joined.logsumexp(-1)
    out = _grouped((joined - lse.unsqueeze(-1)).exp(), torch.cat(values, 2))
    return out.to(call.query.dtype), lse


def _widened(rows: Rows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    keys, values = rows.keys.to(dtype), rows.values.to(dtype)
    if rows.key_scale is not None:
        keys = keys * rows.key_scale[..., None, None].to(dtype)
    if rows.value_scale is not None:
        values = values * rows.value_scale[..., None, None].to(dtype)
    return keys, values


def _rounded(query: Tensor) -> Tensor:
    """Rounded to E4M3 with a scale a row, as the kernel rounds it."""
    scale = (query.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=1e-30)
    return (query / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).to(query.dtype) * scale


def _grouped(left: Tensor, right: Tensor) -> Tensor:
    """``[B, Hq, M, K] @ [B, Hkv, K, N]``, the query heads of a KV head together."""
    batch, heads, rows, inner = left.shape
    return (left.reshape(batch, right.shape[1], -1, inner) @ right).reshape(batch, heads, rows, -1)
