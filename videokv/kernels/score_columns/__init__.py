"""Columns of a correction, written where attention reads them: one pass over queries, one a chunk.

    wide query = [q, -phi_0(q) / scale, -phi_1(q) / scale, ..., 0]      key columns = omega or 0

phi of a map is the sum over each group of channels of the 2nd or 4th power of the query, projected
off the map's basis and rotated where it says so (``noise.QueryMap``). In PyTorch steps that is some
float32 tensors of the query's size for every map; the kernel keeps all of them in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from videokv.noise import QueryMap
from videokv.rotation import Rotation

__all__ = ["KeyBlock", "fill_key_columns", "kernel_refusal", "widen_query"]

KeyBlock = tuple[int, Tensor]
"""First column, and weights ``[B, Hkv, T, F]`` of F columns (T may be 1 and broadcast)."""

MAX_HEAD_DIM = 256
MAX_RANK = 64
MOST_BLOCKS = 2  # blocks of columns of one chunk that a launch writes
PROJECTED = (
    "Triton 3.6 compiles the product with a PSAC basis for compute capability 9.0 so that it reads "
    "beyond shared memory"
)
_TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 1e-4}


@dataclass(frozen=True, eq=False)
class _Widening:
    """One request; see ``widen_query``."""

    query: Tensor
    maps: tuple[QueryMap, ...]
    scale: float
    width: int


def widen_query(query: Tensor, maps: Sequence[QueryMap], *, scale: float, width: int) -> Tensor:
    """``[B, Hq, M, width]``: the query, the columns of every map side by side, zeros.

    query: ``[B, Hq, M, D]``; D + columns <= width. scale: softmax scale. By the kernel where
    ``kernel_refusal`` finds no reason against it, else by the reference.
    """
    head_dim = query.shape[3]
    columns = sum(head_dim // m.group_size for m in maps)
    if head_dim + columns > width:
        raise ValueError(f"width must hold {head_dim} channels and {columns} columns, got {width}")
    asked = _Widening(query, tuple(maps), scale, width)
    refusal = kernel_refusal(query, maps, scale=scale, width=width)
    if refusal is not None:
        if wants_kernels(query.device):
            say_once(f"columns of queries are made in PyTorch steps: {refusal}")
        return reference.widen_query(query, asked.maps, scale=scale, width=width)
    return _run(asked)


def fill_key_columns(out: Tensor, blocks: Sequence[KeyBlock]) -> None:
    """Write the columns ``[B, Hkv, T, F]`` of one chunk: its weights, and zeros between them."""
    if _filling_refusal(out, blocks) is None:
        _kernel().fill_key_columns(out, blocks)
    else:
        reference.fill_key_columns(out, blocks)


def _filling_refusal(out: Tensor, blocks: Sequence[KeyBlock]) -> str | None:
    if len(blocks) > MOST_BLOCKS or out.dtype == torch.float64 or out.stride(3) != 1:
        return f"up to {MOST_BLOCKS} blocks of columns that lie side by side, not in float64"
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
    query: Tensor, maps: Sequence[QueryMap], *, scale: float, width: int
) -> str | None:
    """Why the Triton kernel does not serve these maps, or None; a first use is checked here."""
    if query.dtype not in _TOLERANCE:
        return f"queries are one of {tuple(_TOLERANCE)}, got {query.dtype}"
    if query.shape[3] > MAX_HEAD_DIM:
        return f"head sizes up to {MAX_HEAD_DIM}, got {query.shape[3]}"
    if not maps:
        return "there are no maps"
    refusal = machine_refusal(query.device)
    if refusal is not None:
        return refusal
    size = maps[0].group_size
    if size & (size - 1) or any(m.group_size != size for m in maps):
        return "maps have one group size, a power of two"
    turn = maps[0].transform
    if any(m.transform != turn for m in maps) or not (turn is None or isinstance(turn, Rotation)):
        return "maps share one rotation, or have none"
    bases = [m.basis for m in maps if m.basis is not None]
    if bases and query.device.type == "cuda":
        return PROJECTED
    if any(b.shape != bases[0].shape or b.dtype != bases[0].dtype for b in bases):
        return "bases have one shape and dtype"
    if bases and (bases[0].shape[3] > MAX_RANK or bases[0].shape[0] != query.shape[0]):
        return f"bases are [B, Hkv, D, rank <= {MAX_RANK}], got {tuple(bases[0].shape)}"
    config = (
        query.dtype, query.shape[3], size, width, turn,
        tuple((m.basis is not None, m.power) for m in maps),
        None if not bases else (bases[0].shape[3], bases[0].dtype),
        query.stride(3) == 1,
    )  # fmt: skip
    asked = _Widening(query, tuple(maps), scale, width)
    return checked_refusal("score_columns", config, query.device, lambda: _self_check(asked))


def _self_check(asked: _Widening, *, rows: int = 77) -> str | None:
    """Kernel against reference on the first queries."""
    query = asked.query[:, :, :rows]
    got = _run(_Widening(query, asked.maps, asked.scale, asked.width))
    want = reference.widen_query(query.float(), asked.maps, scale=asked.scale, width=asked.width)
    first = query.shape[3]
    return disagreement(
        got[..., first:], want[..., first:], tolerance=_TOLERANCE[query.dtype], what="a column"
    ) or disagreement(got[..., :first], want[..., :first], tolerance=1e-6, what="the query")


def _run(asked: _Widening) -> Tensor:
    out: Tensor = _kernel().widen_query(
        asked.query, asked.maps, scale=asked.scale, width=asked.width
    )
    return out


def _kernel() -> Any:
    from videokv.kernels.score_columns import triton

    return triton
