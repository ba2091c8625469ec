"""The same buffer in E4M3: half the bytes to write and to read, for products in that format.

Packed chunks are reconstructed straight into it, multiplied by one factor a head that brings the
head's largest cached value to the largest that E4M3 holds. Values lie with their tokens side by
side, as E4M3 products take them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from videokv.kernels.reconstruct import decode_into, saturated
from videokv.protocols import Packed, Segment
from videokv.tensors import E4M3, E4M3_MAX

ALIGNED_TOKENS = 16  # bytes that a load takes at once
SMALLEST_PEAK = 1e-30  # below it a scale, or one over it, would leave float32's normal numbers


class NarrowBuffer:
    """Rows for ``tokens`` cached tokens of heads like those of ``current``.

    peaks: largest magnitudes of all those keys and of the values, ``[B, Hkv]`` each.
    """

    def __init__(self, current: Segment, *, tokens: int, peaks: tuple[Tensor, Tensor]) -> None:
        keys, values = current.keys, current.values
        batch, heads, _, size = keys.shape
        room = -(-tokens // ALIGNED_TOKENS) * ALIGNED_TOKENS
        self._keys = keys.new_empty(batch, heads, tokens, size, dtype=E4M3)
        turned = values.new_empty(batch, heads, values.shape[3], room, dtype=E4M3)
        self._values = turned.mT
        self.key_scale, self.value_scale = (
            torch.where(peak > SMALLEST_PEAK, peak.float() / E4M3_MAX, 1.0) for peak in peaks
        )
        self._filled = 0

    def add(self, keys: Packed | Tensor, values: Packed | Tensor, noise: Sequence = ()) -> Segment:
        """The next rows, from packed or dense keys and values."""
        first = self._filled
        self._filled = last = first + keys.shape[2]
        rows = self._keys[:, :, first:last], self._values[:, :, first:last]
        scales = self.key_scale, self.value_scale
        for side, out, scale in zip((keys, values), rows, scales, strict=True):
            factor = (1 / scale)[..., None, None]
            if isinstance(side, Tensor):
                out.copy_(saturated(side.float() * factor, E4M3))
            else:
                decode_into(side, out, factor=factor)
        return Segment(
            *rows, noise=tuple(noise), key_scale=self.key_scale, value_scale=self.value_scale
        )


def peak(rows: Tensor) -> Tensor:
    """The largest magnitude of each head of ``[B, H, T, D]``."""
    return rows.abs().amax((2, 3))
