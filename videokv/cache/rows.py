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
from videokv.kernels.reconstruct.decoding import KEYS, VALUES, Decoding, Source
from videokv.noise import ScoreNoise
from videokv.protocols import Packed, Segment

# Channels after each key that a backend may write columns of a correction into.
SPARE_CHANNELS = 16

Noise = tuple[ScoreNoise, ...]


class Held(NamedTuple):
    """Packed or dense keys and values of a part, the keys' noise, and whether it was packed."""

    keys: Packed | Tensor
    values: Packed | Tensor
    noise: Noise = ()
    packed: bool = False


class Dense(NamedTuple):
    """A dense side, KEYS or VALUES, of the part of that number."""

    rows: Tensor
    side: int
    number: int


class Past(NamedTuple):
    """Parts one after the other, the same for all reads until the committed rows change.

    lengths, noise, marks: tokens and noise of each part, and whether it was packed. packed, dense:
    what of the parts has to be decoded, and what copied.
    """

    lengths: tuple[int, ...]
    noise: tuple[Noise, ...]
    marks: tuple[bool, ...]
    packed: tuple[Source, ...]
    dense: tuple[Dense, ...]
    tokens: int

    @classmethod
    def of(cls, held: Sequence[Held]) -> Past:
        """From its parts, in order."""
        lengths = tuple(part.keys.shape[2] for part in held)
        packed: list[Source] = []
        dense: list[Dense] = []
        row = 0
        for number, (part, tokens) in enumerate(zip(held, lengths, strict=True)):
            for side, what in ((KEYS, part.keys), (VALUES, part.values)):
                if isinstance(what, Tensor):
                    dense.append(Dense(what, side, number))
                else:
                    packed.append(Source(what, side, row))
            row += tokens
        noise, marks = tuple(part.noise for part in held), tuple(part.packed for part in held)
        return cls(lengths, noise, marks, tuple(packed), tuple(dense), row)


class RowBuffer:
    """Rows of a past and, unless they stay ``apart``, of ``current`` behind them.

    spare: channels after each key that belong to nobody (see ``Segment.spare``).
    """

    def __init__(self, past: Past, current: Segment, *, spare: int, apart: bool = False) -> None:
        keys, values = current.keys, current.values
        batch, heads, own, size = keys.shape
        tokens = past.tokens if apart else past.tokens + own
        self._spare, self._apart = spare, apart
        self._past, self._current = past, current
        wide = keys.new_empty(batch, heads, tokens, size + spare)
        self._keys = wide[..., :size] if spare else wide
        self._values = values.new_empty(batch, heads, tokens, values.shape[3])

    def fill(self, decoding: Decoding | None) -> tuple[list[Segment], Decoding]:
        """Write all rows; the segments of the past and the current one, and what makes the next
        read of the same chunks cheap.

        decoding: of the read before.
        """
        past, current, spare = self._past, self._current, self._spare
        decoding = decoding_of(decoding, past.packed)
        decoding.write(self._keys, self._values)
        lengths = past.lengths if self._apart else (*past.lengths, current.keys.shape[2])
        keys = torch.split_with_sizes(self._keys, lengths, 2)
        values = torch.split_with_sizes(self._values, lengths, 2)
        copies = [(rows, (values if side else keys)[number]) for rows, side, number in past.dense]
        if not self._apart:
            copies += [(current.keys, keys[-1]), (current.values, values[-1])]
            current = Segment(keys[-1], values[-1], (), spare)
        copy_rows(copies)
        # The current rows have neither noise nor a mark.
        segments = [
            Segment(k, v, noise, spare, None, None, packed)
            for k, v, noise, packed in zip(keys, values, past.noise, past.marks, strict=False)
        ]
        return [*segments, current], decoding


def decoding_of(decoding: Decoding | None, packed: tuple[Source, ...]) -> Decoding:
    """The one at hand where it is of these very chunks, else a new one."""
    return decoding if decoding is not None and decoding.serves(packed) else Decoding(packed)


def worth_gathering(device: torch.device) -> bool:
    """Whether one buffer is faster than joining parts: where reconstruction writes strided rows."""
    return device.type == "cuda"
