"""Merging attention over disjoint sets of keys by log-sum-exp.

softmax over the union = sum_p exp(lse_p - lse) out_p, lse = log sum_p exp(lse_p). A row that saw no
key in a part has lse -inf there (some kernels say +inf, and leave garbage in its output).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over each part's keys.

    parts: pairs of outputs ``[B, H, M, Dv]`` and natural-log log-sum-exps ``[B, H, M]``. An lse of
    -inf or +inf means that the row has no keys in that part, whose output is then ignored.

    Returns the output in the parts' dtype (summed in at least float32) and the lse in at least
    float32: 0 and -inf for rows without a key in any part, so that later merges stay finite.
    Parts in bfloat16 or float16 were rounded once each before the merge.

    Raises ValueError where there is no part or shapes disagree.
    """
    if not parts:
        raise ValueError("merge_parts expects at least one (output, lse) pair, got none")
    for out, lse in parts:
        if out.shape != parts[0][0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                "merge_parts expects outputs [B, H, M, Dv] of one shape with lse [B, H, M], got "
                f"{[(tuple(o.shape), tuple(s.shape)) for o, s in parts]}"
            )
    dtype = torch.promote_types(parts[0][0].dtype, torch.float32)
    lses = torch.stack([lse.to(dtype) for _, lse in parts])
    lses = lses.masked_fill(lses == torch.inf, -torch.inf)
    peak = lses.amax(0)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)  # -inf - -inf would be NaN
    shares = torch.exp(lses - peak)
    total = shares.sum(0)
    merged = torch.zeros_like(parts[0][0], dtype=dtype)
    for share, (out, _) in zip(shares, parts, strict=True):
        weight = share.unsqueeze(-1)
        merged += torch.where(weight > 0, weight * out.to(dtype), 0.0)  # drops NaN of empty rows
    smallest = torch.finfo(dtype).tiny
    merged = merged / total.clamp(min=smallest).unsqueeze(-1)
    return merged.to(parts[0][0].dtype), peak + torch.log(total)
