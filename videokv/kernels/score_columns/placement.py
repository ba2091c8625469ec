"""Where the weights of a history's keys go: a table for the kernel, the same in Python numbers."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

TOKENS = 128  # rows that a program of the kernel writes


@dataclass(frozen=True)
class Part:
    """Rows one after the other whose weights go to the same columns.

    tokens: their number. first: row of ``Placement.weights`` of the first of them, -1 for rows
    without noise. blocks: (first column, first column of the weights, columns) of each block.
    """

    tokens: int
    first: int = -1
    blocks: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class Placement:
    """weights ``[B, Hkv, R, F]``, F side by side; the parts; columns that all of them need.

    tiles int32 ``[n, 4]``: first row, rows, row of the weights and part of each program. origins
    int32 ``[parts, columns]``: the column of the weights that goes to each column, -1 for none.
    """

    weights: Tensor
    parts: tuple[Part, ...]
    columns: int
    tiles: Tensor
    origins: Tensor

    @classmethod
    def of(cls, weights: Tensor, parts: tuple[Part, ...], *, columns: int) -> Placement:
        """With its tables, on the device of the weights (nothing synchronises)."""
        device = weights.device
        return cls(weights, parts, columns, *_tables(parts, columns, device, _stream(device)))

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
            tiles += [row + step, count, max(part.first, 0) + step, number]
        row += part.tokens
        places = [-1] * columns
        for first, source, count in part.blocks:
            places[first : first + count] = range(source, source + count)
        origins += places
    table = torch.tensor(tiles + origins, dtype=torch.int32).to(device, non_blocking=True)
    split = len(tiles)
    return table[:split].view(-1, 4), table[split:].view(len(parts), columns)
