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

from videokv.cache.rows import SPARE_CHANNELS, Held, Placed, decoding_of
from videokv.kernels.copy_rows import copy_rows
from videokv.kernels.reconstruct import saturated
from videokv.kernels.reconstruct.decoding import VALUES, Decoding
from videokv.protocols import Segment
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
        self._values = turned.mT[:, :, :tokens]
        self.value_scale = torch.where(peak > SMALLEST_PEAK, peak.float() / E4M3_MAX, 1.0)
        self._factor = (1 / self.value_scale)[..., None, None]

    def fill(
        self, held: Sequence[Held], decoding: Decoding | None
    ) -> tuple[list[Segment], Decoding]:
        """See ``RowBuffer.fill``."""
        placed = Placed.of(held, self._keys, self._values)
        decoding = decoding_of(decoding, placed.packed)
        decoding.write(self._keys, self._values, value_factor=self._factor)
        dense_keys = []
        for dense, side, number in placed.dense:
            if side == VALUES:
                placed.values[number].copy_(saturated(dense.float() * self._factor, E4M3))
            else:
                dense_keys.append((dense, placed.keys[number]))
        copy_rows(dense_keys)
        segments = [
            Segment(
                keys,
                values,
                noise=tuple(noise),
                spare=SPARE_CHANNELS,
                value_scale=self.value_scale,
            )
            for (_, _, noise), keys, values in zip(held, placed.keys, placed.values, strict=True)
        ]
        return segments, decoding


def peak(rows: Tensor) -> Tensor:
    """The largest magnitude of each head of ``[B, H, T, D]``."""
    return rows.abs().amax((2, 3))
