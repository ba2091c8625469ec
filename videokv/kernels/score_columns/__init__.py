"""Columns of a correction, written where attention reads them: a pass over queries, one over keys.

    wide query = [q, -phi_0(q) / scale, -phi_1(q) / scale, ..., 0]      key columns = omega or 0

phi of a map is the sum over each group of channels of the 2nd or 4th power of the query, projected
off the map's basis and rotated where it says so (``noise.QueryMap``). In PyTorch steps that is some
float32 tensors of the query's size for every map; the kernel keeps all of them in registers. omega
of a cache's chunk is made once and kept as long as the chunk (``history.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from videokv.kernels.gpu import (
    checked_refusal,
    disagreement,
    machine_refusal,
    say_once,
    wants_kernels,
)
from videokv.kernels.score_columns import reference
from videokv.kernels.score_columns.history import (
    ChunkColumns,
    HistoryCall,
    Widenings,
    chunk_columns,
    first_fit,
    history_from,
    history_of,
    keep_noise,
    stacked_bases,
)
from videokv.kernels.score_columns.placement import Placement
from videokv.noise import QueryMap
from videokv.rotation import Rotation

__all__ = [
    "ChunkColumns",
    "HistoryCall",
    "KeyBlock",
    "Placement",
    "Widenings",
    "chunk_columns",
    "fill_key_columns",
    "first_fit",
    "history_from",
    "history_of",
    "keep_noise",
    "kernel_refusal",
    "place_key_columns",
    "stacked_bases",
    "widen_query",
]

KeyBlock = tuple[int, Tensor]
"""First column, and weights ``[B, Hkv, T, F]`` of F columns (T may be 1 and broadcast)."""

MAX_HEAD_DIM = 256
MAX_RANK = 64
MOST_KNOWN = 16  # kinds of queries of one history
MOST_MAPS = 30  # bits of a 32-bit integer say which maps are projected
_LARGEST_GRID = 65535  # programs of its second axis
MOST_BLOCKS = 2  # blocks of columns of one chunk that a launch writes
_TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 1e-4}


@dataclass(frozen=True, eq=False)
class _Widening:
    """One request; see ``widen_query``."""

    query: Tensor
    maps: tuple[QueryMap, ...]
    scale: float
    width: int
    bases: Tensor | None


def widen_query(
    query: Tensor,
    maps: Sequence[QueryMap],
    *,
    scale: float,
    width: int,
    kv_heads: int,
    bases: Tensor | None = None,
    known: Widenings | None = None,
) -> Tensor:
    """``[B, Hq, M, width]``: the query, the columns of every map side by side, zeros.

    query: ``[B, Hq, M, D]``; D + columns <= width. scale: softmax scale. kv_heads: Hkv, which Hq is
    a multiple of. bases: ``stacked_bases(maps)`` where the caller has them already. known: what
    earlier calls with these maps found out; kept there. By the kernel where ``kernel_refusal``
    finds no reason against it, else by the reference.
    """
    kind = (query.dtype, query.shape, scale, width)
    ready = None if known is None else known.get(kind)
    if ready is not None:
        return ready(query)
    head_dim = query.shape[3]
    columns = sum(head_dim // m.group_size for m in maps)
    if head_dim + columns > width:
        raise ValueError(f"width must hold {head_dim} channels and {columns} columns, got {width}")
    if not maps:
        return reference.widen_query(query, (), scale=scale, width=width)
    refusal = _maps_refusal(query, maps)
    if refusal is None:
        if bases is None:
            bases = stacked_bases(maps, batch=query.shape[0], heads=kv_heads)
        asked = _Widening(query, tuple(maps), scale, width, bases)
        refusal = _checked(asked)
        if refusal is None:
            ready = _ready(asked)
            if known is not None:
                if len(known) >= MOST_KNOWN:
                    known.clear()
                known[kind] = ready
            return ready(query)
    if wants_kernels(query.device):
        say_once(f"columns of queries are made in PyTorch steps: {refusal}")
    return reference.widen_query(query, tuple(maps), scale=scale, width=width)


def place_key_columns(out: Tensor, placement: Placement) -> None:
    """Write the columns ``[B, Hkv, T, F]`` of a history and of rows behind it, which get zeros.

    T is at least the rows of the placement, F at least its columns; all of ``out`` is written.
    """
    if _placing_refusal(out, placement) is None:
        _kernel().place_key_columns(out, placement)
    else:
        reference.place_key_columns(out, placement)


def _placing_refusal(out: Tensor, placement: Placement) -> str | None:
    if torch.float64 in (out.dtype, placement.dtype) or out.stride(3) != 1:
        return "columns that lie side by side, not in float64"
    if out.shape[0] * out.shape[1] > _LARGEST_GRID:
        return _too_many(out)
    refusal = machine_refusal(out.device)
    if refusal is not None:
        return refusal
    config = (out.dtype, out.shape[3], placement.dtype)
    return checked_refusal(
        "history_columns", config, out.device, lambda: _check_placing(out, placement)
    )


def _check_placing(out: Tensor, placement: Placement) -> str | None:
    got, want = (torch.full_like(out, torch.nan) for _ in range(2))
    _kernel().place_key_columns(got, placement)
    reference.place_key_columns(want, placement)
    return None if torch.equal(got, want) else "self-check failed: a key's columns differ"


def fill_key_columns(out: Tensor, blocks: Sequence[KeyBlock]) -> None:
    """Write the columns ``[B, Hkv, T, F]`` of one chunk: its weights, and zeros between them."""
    if _filling_refusal(out, blocks) is None:
        _kernel().fill_key_columns(out, blocks)
    else:
        reference.fill_key_columns(out, blocks)


def _filling_refusal(out: Tensor, blocks: Sequence[KeyBlock]) -> str | None:
    if len(blocks) > MOST_BLOCKS or out.dtype == torch.float64 or out.stride(3) != 1:
        return f"up to {MOST_BLOCKS} blocks of columns that lie side by side, not in float64"
    if out.shape[0] * out.shape[1] > _LARGEST_GRID:
        return _too_many(out)
    refusal = machine_refusal(out.device)
    if refusal is not None:
        return refusal
    shapes = tuple((first, w.shape[2] == 1, w.shape[3], w.dtype) for first, w in blocks)
    config = (out.dtype, out.shape[3], shapes)
    return checked_refusal("key_columns", config, out.device, lambda: _check_filling(out, blocks))


def _check_filling(out: Tensor, blocks: Sequence[KeyBlock], *, tokens: int = 300) -> str | None:
    few = [(first, weights[:, :, :tokens]) for first, weights in blocks]
    got, want = (torch.full_like(out[:, :, :tokens], torch.nan) for _ in range(2))
    _kernel().fill_key_columns(got, few)
    reference.fill_key_columns(want, few)
    return disagreement(got, want, tolerance=1e-6, what="a key's columns")


def kernel_refusal(
    query: Tensor, maps: Sequence[QueryMap], *, scale: float, width: int, kv_heads: int
) -> str | None:
    """Why the Triton kernel does not serve these maps, or None; a first use is checked here."""
    refusal = _maps_refusal(query, maps)
    if refusal is not None:
        return refusal
    bases = stacked_bases(maps, batch=query.shape[0], heads=kv_heads)
    return _checked(_Widening(query, tuple(maps), scale, width, bases))


def _maps_refusal(query: Tensor, maps: Sequence[QueryMap]) -> str | None:
    if query.dtype not in _TOLERANCE:
        return f"queries are one of {tuple(_TOLERANCE)}, got {query.dtype}"
    if query.shape[3] > MAX_HEAD_DIM:
        return f"head sizes up to {MAX_HEAD_DIM}, got {query.shape[3]}"
    if query.shape[0] * query.shape[1] > _LARGEST_GRID:
        return _too_many(query)
    if not maps:
        return "there are no maps"
    refusal = machine_refusal(query.device)
    if refusal is not None:
        return refusal
    if len(maps) > MOST_MAPS:
        return f"at most {MOST_MAPS} maps in one call, got {len(maps)}"
    size, turn = maps[0].group_size, maps[0].transform
    if size & (size - 1) or any(m.group_size != size for m in maps):
        return "maps have one group size, a power of two"
    if not (turn is None or isinstance(turn, Rotation)):
        return "maps share one rotation, or have none"
    if any(m.transform is not turn and m.transform != turn for m in maps):
        return "maps share one rotation, or have none"
    ranks = [m.basis.shape[3] for m in maps if m.basis is not None]
    if ranks and max(ranks) > MAX_RANK:
        return f"bases have a rank of at most {MAX_RANK}, got {max(ranks)}"
    return None


def _too_many(rows: Tensor) -> str:
    return f"{rows.shape[0]} x {rows.shape[1]} heads are more than {_LARGEST_GRID}"


def _checked(asked: _Widening) -> str | None:
    query, maps, bases = asked.query, asked.maps, asked.bases
    config = (
        query.dtype, query.shape[3], maps[0].group_size, asked.width, maps[0].transform,
        any(m.power == 4 for m in maps), query.stride(3) == 1,
        None if bases is None else (bases.shape[3], bases.dtype, min(len(maps), 64)),
        all(m.basis is not None for m in maps),
    )  # fmt: skip
    return checked_refusal("score_columns", config, query.device, lambda: _self_check(asked))


def _self_check(asked: _Widening, *, rows: int = 77) -> str | None:
    """Kernel against reference on the first queries."""
    query = asked.query[:, :, :rows]
    got = _ready(replace(asked, query=query))(query)
    want = reference.widen_query(query.float(), asked.maps, scale=asked.scale, width=asked.width)
    first = query.shape[3]
    return disagreement(
        got[..., first:], want[..., first:], tolerance=_TOLERANCE[query.dtype], what="a column"
    ) or disagreement(got[..., :first], want[..., :first], tolerance=1e-6, what="the query")


def _ready(asked: _Widening) -> Callable[[Tensor], Tensor]:
    """The kernel's launches for queries of this kind."""
    found: Callable[[Tensor], Tensor] = _kernel().widening(
        asked.query, asked.maps, scale=asked.scale, width=asked.width, bases=asked.bases
    )
    return found


def _kernel() -> Any:
    from videokv.kernels.score_columns import triton

    return triton
