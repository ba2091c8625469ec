"""The merge in PyTorch steps."""

from __future__ import annotations

from torch import Tensor

from videokv.attention.merge import merge_parts


def merge_rows(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """See the package."""
    pairs = zip(parts.split(1), lses.split(1), strict=True)
    return merge_parts(list(pairs))
