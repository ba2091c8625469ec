"""What a cache holds, counted from live storages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from videokv.cache.chunks import PackedChunk
from videokv.cache.layer import LayerCache
from videokv.tensors import held_bytes


@dataclass(frozen=True)
class Memory:
    """dense_bytes: what the same visible tokens take in the model's dtype.
    held_bytes: storages kept alive: codes, steps, stored factors, dense sink, recent and tail rows.
    workspace_peak_bytes: the most that decoded chunks took at once (transient).
    state_bytes: query statistics kept for encoding.
    bits_per_element: of packed chunks alone, mean of keys and values; where nothing is packed, the
        width of the model's dtype.
    ratio: dense_bytes / held_bytes.
    """

    dense_bytes: int
    held_bytes: int
    workspace_peak_bytes: int
    state_bytes: int
    bits_per_element: float
    ratio: float

    def __str__(self) -> str:
        return (
            f"dense {_readable(self.dense_bytes)}, held {_readable(self.held_bytes)} "
            f"({self.ratio:.2f}x smaller), {self.bits_per_element:.3f} bits per element, "
            f"workspace peak {_readable(self.workspace_peak_bytes)}, "
            f"query statistics {_readable(self.state_bytes)}"
        )


def measured(layers: Iterable[LayerCache], *, workspace_peak_bytes: int) -> Memory:
    """Count all layers together; a storage that several share counts once."""
    layers = list(layers)
    dense = sum(layer.dense_bytes() for layer in layers)
    held = held_bytes(*(layer.held() for layer in layers))
    return Memory(
        dense_bytes=dense,
        held_bytes=held,
        workspace_peak_bytes=workspace_peak_bytes,
        state_bytes=held_bytes(*(layer.statistics() for layer in layers)),
        bits_per_element=_bits_per_element(layers),
        ratio=dense / held if held else 1.0,
    )


def combined(memories: Iterable[Memory]) -> Memory:
    """Several caches (the branches of a guided model) as one; bits weighted by dense bytes."""
    parts = list(memories)
    if len(parts) == 1:
        return parts[0]
    dense = sum(part.dense_bytes for part in parts)
    held = sum(part.held_bytes for part in parts)
    weighted = sum(part.bits_per_element * part.dense_bytes for part in parts)
    return Memory(
        dense_bytes=dense,
        held_bytes=held,
        workspace_peak_bytes=sum(part.workspace_peak_bytes for part in parts),
        state_bytes=sum(part.state_bytes for part in parts),
        bits_per_element=weighted / dense if dense else 16.0,
        ratio=dense / held if held else 1.0,
    )


def _bits_per_element(layers: list[LayerCache]) -> float:
    chunks = [c for layer in layers for c in layer.state.chunks if isinstance(c, PackedChunk)]
    if not chunks:
        widths = [8 * layer.state.layout.dtype.itemsize for layer in layers if layer.state.layout]
        return float(widths[0]) if widths else 16.0
    return (_bits([c.keys for c in chunks]) + _bits([c.values for c in chunks])) / 2


def _bits(sides: list) -> float:
    """Bits per element of the sides together, shared storages counted once."""
    return 8 * held_bytes(*sides) / sum(math.prod(side.shape) for side in sides)


def _readable(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
