"""The last wave of a stock kernel: where it would leave most multiprocessors idle, its rows attend
to parts of the keys, and the parts are merged.

On Hopper FlashAttention-4 and cuDNN run one program for 128 queries of a head, one program a
multiprocessor. 4,680 queries of 12 heads are 444 programs on 132 multiprocessors: three full waves
and a fourth of 48 programs, which takes as long as a full one. The rows of the fourth are cut off;
each attends to, say, fifths of the keys, so that 240 shorter programs take its place. It is one
more call of the same kernel (the parts are rows of a batch) and a merge by log-sum-exp.

What is assumed here of a kernel's programs decides speed alone, never the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from videokv.kernels.merge_tail import merge_tail

MOST_PARTS = 12
CALL_TOKENS = 5000  # what a second call and the merge cost, in keys of a wave (55 us on one H200)
MERGED_ROWS = 90  # rows of parts that are written and merged in the time of one key of a wave
WORTH = 0.04  # share of the call that a split must save
_HOPPER = 9


@dataclass(frozen=True)
class Split:
    """The first ``rows`` queries attend to all keys, the others to ``parts`` equal parts of them.

    cost: of the whole, in waves over all keys.
    """

    rows: int
    parts: int
    cost: float


def split_for(kernel: str, query: Tensor, keys: Tensor, values: Tensor) -> Split | None:
    """How a call of ``kernel`` on ``[B, Hq, M, D]`` and ``[B, Hkv, T, D]`` is best split, or None
    where it is not: batches, other kernels and devices, nothing to gain."""
    if query.device.type != "cuda" or query.shape[0] != 1:
        return None
    tile = _rows_of_program(kernel, max(query.shape[3], values.shape[3]))
    if tile is None:
        return None
    processors = _processors(query.device)
    if processors is None:
        return None
    return best_split(
        rows=query.shape[2],
        heads=query.shape[1],
        tokens=keys.shape[2],
        tile=tile,
        processors=processors,
    )


@functools.lru_cache(maxsize=1024)
def best_split(*, rows: int, heads: int, tokens: int, tile: int, processors: int) -> Split | None:
    """The cheapest split of ``heads`` times ``rows`` queries over ``tokens`` keys, or None.

    tile: queries of a program. processors: programs that run at once. Parts divide the keys
    evenly, so that they are views of one tensor.
    """
    blocks = _ceil(rows, tile)
    whole = float(_ceil(blocks * heads, processors))
    best: Split | None = None
    for parts in range(2, MOST_PARTS + 1):
        if tokens % parts:
            continue
        for first in range(1, blocks):
            rest = _ceil((blocks - first) * heads * parts, processors) / parts
            merged = (rows - first * tile) * heads * parts / MERGED_ROWS
            cost = _ceil(first * heads, processors) + rest + (CALL_TOKENS + merged) / tokens
            if cost < (whole * (1 - WORTH) if best is None else best.cost):
                best = Split(first * tile, parts, cost)
    return best


def run_split(
    run: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    split: Split,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output ``[1, Hq, M, Dv]`` and lse ``[1, Hq, M]`` of two calls of ``run``.

    run: a ``KernelChoice.run``.
    """
    first, first_lse = run(query[:, :, : split.rows], keys, values, scale=scale, causal=False)
    last = query[:, :, split.rows :].expand(split.parts, -1, -1, -1).contiguous()
    parts, lses = run(
        last, _parts(keys, split.parts), _parts(values, split.parts), scale=scale, causal=False
    )
    return merge_tail(first, first_lse, parts, lses)


def _parts(rows: Tensor, count: int) -> Tensor:
    """``[1, H, T, D]`` as ``[count, H, T / count, D]``, a view."""
    return rows.unflatten(2, (count, -1)).transpose(0, 2).squeeze(2)


@functools.lru_cache(maxsize=16)
def _processors(device: torch.device) -> int | None:
    """Multiprocessors of a Hopper GPU; None where the programs of its kernels are not known."""
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count) if properties.major == _HOPPER else None


def _rows_of_program(kernel: str, head_dim: int) -> int | None:
    if kernel in ("fa4", "cudnn"):
        return 128 if 96 < head_dim <= 192 else None
    return None


def _ceil(count: int, unit: int) -> int:
    return -(-count // unit)
