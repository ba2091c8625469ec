"""One dense buffer for everything that a layer's attention reads, filled chunk by chunk.

Packed chunks are reconstructed straight into their rows and the current chunk is copied behind
them, so that a kernel gets one tensor of keys and one of values without joining them again. The
buffer lives for one call; the allocator hands the same memory to the next layer and step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from videokv.kernels.reconstruct import decode_into
from videokv.protocols import Packed, Segment

# Channels after each key that a backend may write columns of a correction into.
SPARE_CHANNELS = 16


class RowBuffer:
    """Rows for ``tokens`` tokens of heads like those of ``current``.

    spare: channels after each key that belong to nobody (see ``Segment.spare``).
    """

    def __init__(self, current: Segment, *, tokens: int, spare: int) -> None:
        keys, values = current.keys, current.values
        batch, heads, _, size = keys.shape
        self.spare = spare
        self._keys = keys.new_empty(batch, heads, tokens, size + spare)[..., :size]
        self._values = values.new_empty(batch, heads, tokens, values.shape[3])
        self._filled = 0

    def add(self, keys: Packed | Tensor, values: Packed | Tensor, noise: Sequence = ()) -> Segment:
        """The next rows, from packed or dense keys and values."""
        first = self._filled
        self._filled = last = first + keys.shape[2]
        rows = self._keys[:, :, first:last], self._values[:, :, first:last]
        for side, out in zip((keys, values), rows, strict=True):
            if isinstance(side, Tensor):
                out.copy_(side)
            else:
                decode_into(side, out)
        return Segment(*rows, noise=tuple(noise), spare=self.spare)


def worth_gathering(device: torch.device) -> bool:
    """Whether one buffer is faster than joining parts: where reconstruction writes strided rows."""
    return device.type == "cuda"
