"""One dense buffer for everything that a layer's attention reads.

Packed chunks are reconstructed straight into their rows, all at once, and dense ones and the
current chunk are copied beside them, so that a kernel gets one tensor of keys and one of values
without joining them again. The buffer lives for one call; the allocator hands the same memory to
the next layer and step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from videokv.kernels.copy_rows import copy_rows
from videokv.kernels.reconstruct.decoding import Decoding, Source
from videokv.protocols import Packed, Segment

# Channels after each key that a backend may write columns of a correction into.
SPARE_CHANNELS = 16

Held = tuple[Packed | Tensor, Packed | Tensor, Sequence]
"""Packed or dense keys and values, and the keys' noise."""


class Dense(NamedTuple):
    """A dense side, KEYS or VALUES, of the part of that number."""

    rows: Tensor
    side: int
    number: int


class Placed(NamedTuple):
    """Views of a buffer, one for each part, and what of the parts is packed or dense."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    packed: list[Source]
    dense: list[Dense]

    @classmethod
    def of(cls, held: Sequence[Held], keys: Tensor, values: Tensor) -> Placed:
        """Parts one after the other in rows of keys and values, which they fill."""
        lengths = [part_keys.shape[2] for part_keys, _, _ in held]
        packed: list[Source] = []
        dense: list[Dense] = []
        row = 0
        for number, ((*sides, _), tokens) in enumerate(zip(held, lengths, strict=True)):
            for side, what in enumerate(sides):
                if isinstance(what, Tensor):
                    dense.append(Dense(what, side, number))
                else:
                    packed.append(Source(what, side, row))
            row += tokens
        return cls(keys.split(lengths, 2), values.split(lengths, 2), packed, dense)


class RowBuffer:
    """Rows of heads like those of ``current``.

    spare: channels after each key that belong to nobody (see ``Segment.spare``).
    """

    def __init__(self, current: Segment, *, tokens: int, spare: int) -> None:
        keys, values = current.keys, current.values
        batch, heads, _, size = keys.shape
        self.spare = spare
        self._keys = keys.new_empty(batch, heads, tokens, size + spare)[..., :size]
        self._values = values.new_empty(batch, heads, tokens, values.shape[3])

    def fill(
        self, held: Sequence[Held], decoding: Decoding | None
    ) -> tuple[list[Segment], Decoding]:
        """Write all parts; their segments, and what makes the next read of the same chunks cheap.

        held: parts whose tokens are those of the buffer. decoding: of the read before.
        """
        placed = Placed.of(held, self._keys, self._values)
        decoding = decoding_of(decoding, placed.packed)
        decoding.write(self._keys, self._values)
        rows = (placed.keys, placed.values)
        copy_rows([(dense, rows[side][number]) for dense, side, number in placed.dense])
        segments = [
            Segment(keys, values, noise=tuple(noise), spare=self.spare)
            for (_, _, noise), keys, values in zip(held, *rows, strict=True)
        ]
        return segments, decoding


def decoding_of(decoding: Decoding | None, packed: Sequence[Source]) -> Decoding:
    """The one at hand where it is of these very chunks, else a new one."""
    return decoding if decoding is not None and decoding.serves(packed) else Decoding(packed)


def worth_gathering(device: torch.device) -> bool:
    """Whether one buffer is faster than joining parts: where reconstruction writes strided rows."""
    return device.type == "cuda"
