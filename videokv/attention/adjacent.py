"""Chunks that already lie one after the other in one buffer need no copy to be one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(parts: Sequence[Tensor]) -> Tensor:
    """All rows of ``[B, H, T_i, D]`` as one ``[B, H, sum T_i, D]``.

    A view where the parts are consecutive rows of one buffer, else a copy.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if not consecutive(parts):
        return torch.cat(list(parts), 2)
    tokens = sum(part.shape[2] for part in parts)
    shape = (*first.shape[:2], tokens, first.shape[3])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def consecutive(parts: Sequence[Tensor]) -> bool:
    """Whether ``[B, H, T_i, D]`` are rows of one buffer, one after the other."""
    first = parts[0]
    place = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.stride() != first.stride() or part.dtype != first.dtype:
            return False
        if part.storage_offset() != place or part.shape[:2] != first.shape[:2]:
            return False
        place += part.shape[2] * part.stride(2)
    return True
