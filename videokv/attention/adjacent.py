"""Chunks that already lie one after the other in one buffer need no copy to be one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(parts: Sequence[Tensor]) -> Tensor:
    """All rows of ``[B, H, T_i, D]`` as one ``[B, H, sum T_i, D]``.

    A view where the parts are consecutive rows of one buffer, else a copy.
    """
    whole = as_one(parts)
    return torch.cat(list(parts), 2) if whole is None else whole


def as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """``[B, H, T_i, D]`` as one view ``[B, H, sum T_i, D]``; None where they are not rows of one
    buffer, one after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    batch, heads, _, size = first.shape
    steps, dtype, begin = first.stride(), first.dtype, first.data_ptr()
    row_bytes, tokens = steps[2] * dtype.itemsize, 0
    for part in parts:
        shape = part.shape
        if part.data_ptr() != begin + tokens * row_bytes or part.stride() != steps:
            return None
        if part.dtype != dtype or shape[0] != batch or shape[1] != heads or shape[3] != size:
            return None
        tokens += shape[2]
    last = parts[-1]
    if last.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
        return None  # neighbours by chance
    return first.as_strided((batch, heads, tokens, size), steps, first.storage_offset())
