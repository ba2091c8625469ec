"""Where the weights of a history's keys go: a table for the kernel, the same in Python numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOKENS = 128  # rows that a program of the kernel writes


@dataclass(frozen=True)
class Part:
    """Rows one after the other whose weights go to the same columns.

    tokens: their number. blocks: (first column, first column of the weights, columns) of each
    block; none for rows without noise.
    """

    tokens: int
    blocks: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class Placement:
    """The parts, their weights ``[B, Hkv, T, F]`` (F side by side, heads of all batch rows equally
    far apart) or None, all of one dtype; columns that all of them need.

    tiles int32 ``[n, 4]``: first row, rows, row within its part and part of each program. origins
    int32 ``[parts, columns]``: the column of the weights that goes to each column, -1 for none.
    places int64 ``[parts, 3]``: address of each part's weights (0 for none), strides of their heads
    and tokens. A CUDA graph follows the addresses: it must not outlive the placement.
    """

    weights: tuple[Tensor | None, ...]
    parts: tuple[Part, ...]
    columns: int
    dtype: torch.dtype
    tiles: Tensor
    origins: Tensor
    places: Tensor

    @classmethod
    def of(
        cls, weights: Sequence[Tensor | None], parts: tuple[Part, ...], *, columns: int
    ) -> Placement:
        """With its tables, on the device of the weights (nothing synchronises)."""
        held = tuple(None if w is None else _evenly_spaced(w) for w in weights)
        first = next(w for w in held if w is not None)
        numbers: list[int] = []
        for w in held:
            numbers += (0, 0, 0) if w is None else (w.data_ptr(), w.stride(1), w.stride(2))
        device = first.device
        table = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
        places = table.to(device, non_blocking=True).view(-1, 3)
        tables = _tables(parts, columns, device, _stream(device))
        return cls(held, parts, columns, first.dtype, *tables, places)

    @property
    def tokens(self) -> int:
        """Rows of all parts."""
        return sum(part.tokens for part in self.parts)


def _stream(device: torch.device) -> int:
    """Of the copy to the device: it is not waited for, so that others may not use it."""
    return torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0


@functools.lru_cache(maxsize=64)
def _tables(
    parts: tuple[Part, ...], columns: int, device: torch.device, stream: int
) -> tuple[Tensor, Tensor]:
    """Layers whose chunks are alike share them, on one stream."""
    tiles, origins = [], []
    row = 0
    for number, part in enumerate(parts):
        for step in range(0, part.tokens, TOKENS):
            count = min(TOKENS, part.tokens - step)
            tiles += [row + step, count, step, number]
        row += part.tokens
        places = [-1] * columns
        for first, source, count in part.blocks:
            places[first : first + count] = range(source, source + count)
        origins += places
    table = torch.tensor(tiles + origins, dtype=torch.int32).to(device, non_blocking=True)
    split = len(tiles)
    return table[:split].view(-1, 4), table[split:].view(len(parts), columns)


def _evenly_spaced(weights: Tensor) -> Tensor:
    """As ``Placement`` takes them: those of a chunk are, or some of its rows."""
    batch, heads, _, size = weights.shape
    even = batch == 1 or weights.stride(0) == heads * weights.stride(1)
    return weights if even and (size == 1 or weights.stride(3) == 1) else weights.contiguous()
