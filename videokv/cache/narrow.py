"""The same buffer with values in E4M3: half their bytes, for products in that format.

Packed values are reconstructed straight into it, multiplied by one factor a head that brings the
head's largest cached value to the largest that E4M3 holds. They lie with their tokens side by side,
as E4M3 products take them. Keys stay in the model's dtype: a rounded score is wrong by a share of
itself, which the exponential blows up (relative errors of the output of 5e-2 to 8e-2, against 4e-2
with rounded values and weights alone).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from videokv.cache.rows import SPARE_CHANNELS, Past, decoding_of
from videokv.kernels.copy_rows import copy_rows
from videokv.kernels.reconstruct import saturated
from videokv.kernels.reconstruct.decoding import VALUES, Decoding
from videokv.protocols import Segment
from videokv.tensors import E4M3, E4M3_MAX

ALIGNED_TOKENS = 16  # bytes that a load takes at once
SMALLEST_PEAK = 1e-30  # below it a scale, or one over it, would leave float32's normal numbers


class ValueScales(NamedTuple):
    """What E4M3 values of a head are multiplied by, ``[B, Hkv]``, and what rows are before they are
    rounded, ``[B, Hkv, 1, 1]``; float32."""

    scale: Tensor
    factor: Tensor

    @classmethod
    def of(cls, peak: Tensor) -> ValueScales:
        """peak: largest magnitudes ``[B, Hkv]`` of all values."""
        scale = torch.where(peak > SMALLEST_PEAK, peak.float() / E4M3_MAX, 1.0)
        return cls(scale, (1 / scale)[..., None, None])


class NarrowBuffer:
    """Rows of a past of heads like those of ``current``; scales: of its values."""

    def __init__(self, past: Past, current: Segment, *, scales: ValueScales) -> None:
        self._past, tokens = past, past.tokens
        self._scale, self._factor = scales
        keys, values = current.keys, current.values
        batch, heads, _, size = keys.shape
        room = -(-tokens // ALIGNED_TOKENS) * ALIGNED_TOKENS
        wide = keys.new_empty(batch, heads, room, size + SPARE_CHANNELS)
        self._keys = wide[:, :, :tokens, :size]
        turned = values.new_empty(batch, heads, values.shape[3], room, dtype=E4M3)
        self._values = turned.mT[:, :, :tokens]

    def fill(self, decoding: Decoding | None) -> tuple[list[Segment], Decoding]:
        """See ``RowBuffer.fill``; without the current rows."""
        past = self._past
        decoding = decoding_of(decoding, past.packed)
        decoding.write(self._keys, self._values, value_factor=self._factor)
        keys, values = (x.split(past.lengths, 2) for x in (self._keys, self._values))
        dense_keys = []
        for dense, side, number in past.dense:
            if side == VALUES:
                values[number].copy_(saturated(dense.float() * self._factor, E4M3))
            else:
                dense_keys.append((dense, keys[number]))
        copy_rows(dense_keys)
        parts = zip(keys, values, past.noise, past.marks, strict=True)
        segments = [
            Segment(k, v, noise, SPARE_CHANNELS, None, self._scale, packed)
            for k, v, noise, packed in parts
        ]
        return segments, decoding


def peak(rows: Tensor) -> Tensor:
    """The largest magnitude of each head of ``[B, H, T, D]``."""
    return rows.abs().amax((2, 3))
