"""Tile sizes by what fits into a program's shared memory, not by the card's name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """queries x keys of one step, warps of a program, depth of the load pipeline.

    descriptors: whether the copy engine of Hopper and later loads keys and values, where it can.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    descriptors: bool = True

    def __post_init__(self) -> None:
        for name, value in (("queries", self.queries), ("keys", self.keys)):
            if value < 16 or value & (value - 1):
                raise ValueError(f"tile {name} must be a power of two from 16 on, got {value}")

    def shared_bytes(
        self,
        *,
        item_bytes: int,
        head_dim: int,
        value_dim: int,
        columns: int,
        value_bytes: int | None = None,
    ) -> int:
        """What the queries and the pipelined keys, values and columns take (an upper estimate)."""
        key_row = head_dim * item_bytes + value_dim * (value_bytes or item_bytes)
        key_row += columns * min(item_bytes * 2, 4)
        weights = self.queries * self.keys * item_bytes
        queries = self.queries * (head_dim * item_bytes + columns * 4)
        return self.stages * self.keys * key_row + queries + (weights if item_bytes == 4 else 0)


# Widest first. The first of each kind that fits is taken.
_MANY_ROWS = (
    Tile(128, 64, 8, 4),
    Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 2),
    Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 2),
    Tile(64, 32, 4, 2),
    Tile(32, 32, 4, 2),
    Tile(16, 32, 4, 1),
    Tile(16, 16, 4, 1),
)
# Values in E4M3 leave room for wider blocks of keys (2.18 ms where 128 x 64 takes 2.50 on an H200).
_NARROW_VALUES = (Tile(128, 128, 8, 3), *_MANY_ROWS)
_FEW_ROWS = (Tile(16, 128, 4, 3), Tile(16, 64, 4, 3), Tile(16, 32, 4, 2), Tile(16, 16, 4, 1))
# Float32 products of large tiles do not fit into registers.
_FLOAT32 = (Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1))
_RESERVED_BYTES = 2048


def choose_tile(
    *,
    limit_bytes: int,
    item_bytes: int,
    head_dim: int,
    value_dim: int,
    columns: int,
    rows: int,
    value_bytes: int | None = None,
) -> Tile | None:
    """The first tile within ``limit_bytes``, None where none is. Sizes are rounded up to powers
    of two, as the kernel does. rows: number of queries. value_bytes: of cached values in E4M3."""
    tiles: tuple[Tile, ...]
    tiles = _FLOAT32 if item_bytes == 4 else _FEW_ROWS if rows <= 16 else _MANY_ROWS
    if value_bytes == 1 and tiles is _MANY_ROWS:
        tiles = _NARROW_VALUES
    wide = max(head_dim, value_dim) > 128
    for tile in tiles:
        if wide and tile.queries * tile.keys > 128 * 64:
            continue  # two accumulators of 128 x 256 do not fit into registers
        needed = tile.shared_bytes(
            item_bytes=item_bytes,
            head_dim=padded(head_dim),
            value_dim=padded(value_dim),
            columns=padded(columns) if columns else 0,
            value_bytes=value_bytes,
        )
        if needed + _RESERVED_BYTES <= limit_bytes:
            return tile
    return None


def padded(size: int) -> int:
    """The power of two from 16 on that holds ``size``."""
    return max(16, 1 << (size - 1).bit_length())
