"""The same buffer with values in E4M3: half their bytes, for products in that format.

Packed values are reconstructed straight into it, multiplied by one factor a head that brings the
head's largest cached value to the largest that E4M3 holds. They lie with their tokens side by side,
as E4M3 products take them. Keys stay in the model's dtype: a rounded score is wrong by a share of
itself, which the exponential blows up (relative errors of the output of 5e-2 to 8e-2, against 4e-2
with rounded values and weights alone).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from videokv.cache.rows import SPARE_CHANNELS
from videokv.kernels.reconstruct import decode_into, saturated
from videokv.protocols import Packed, Segment
from videokv.tensors import E4M3, E4M3_MAX

ALIGNED_TOKENS = 16  # bytes that a load takes at once
SMALLEST_PEAK = 1e-30  # below it a scale, or one over it, would leave float32's normal numbers


class NarrowBuffer:
    """Rows for ``tokens`` cached tokens of heads like those of ``current``.

    peak: largest magnitudes of all those values, ``[B, Hkv]``.
    """

    def __init__(self, current: Segment, *, tokens: int, peak: Tensor) -> None:
        keys, values = current.keys, current.values
        batch, heads, _, size = keys.shape
        room = -(-tokens // ALIGNED_TOKENS) * ALIGNED_TOKENS
        self._keys = keys.new_empty(batch, heads, tokens, size + SPARE_CHANNELS)[..., :size]
        turned = values.new_empty(batch, heads, values.shape[3], room, dtype=E4M3)
        self._values = turned.mT
        self.value_scale = torch.where(peak > SMALLEST_PEAK, peak.float() / E4M3_MAX, 1.0)
        self._factor = (1 / self.value_scale)[..., None, None]
        self._filled = 0

    def add(self, keys: Packed | Tensor, values: Packed | Tensor, noise: Sequence = ()) -> Segment:
        """The next rows, from packed or dense keys and values."""
        first = self._filled
        self._filled = last = first + keys.shape[2]
        key_rows, value_rows = self._keys[:, :, first:last], self._values[:, :, first:last]
        if isinstance(keys, Tensor):
            key_rows.copy_(keys)
        else:
            decode_into(keys, key_rows)
        if isinstance(values, Tensor):
            value_rows.copy_(saturated(values.float() * self._factor, E4M3))
        else:
            decode_into(values, value_rows, factor=self._factor)
        return Segment(
            key_rows,
            value_rows,
            noise=tuple(noise),
            spare=SPARE_CHANNELS,
            value_scale=self.value_scale,
        )


def peak(rows: Tensor) -> Tensor:
    """The largest magnitude of each head of ``[B, H, T, D]``."""
    return rows.abs().amax((2, 3))
