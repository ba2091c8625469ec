"""Rows that are written but not final: laid over each other, cut into chunks."""

from __future__ import annotations

import torch

from videokv.cache.chunks import Rows
from videokv.kernels.copy_rows import copy_rows
from videokv.tensors import walk_tensors


def overwrite(tail: Rows | None, fresh: Rows) -> Rows:
    """All of the tail anew; the buffers are used again where shapes and dtypes are the same."""
    if tail is None or _kinds(tail) != _kinds(fresh):
        tail = fresh.each(lambda t: torch.empty_like(t, memory_format=torch.contiguous_format))
    copy_rows([(fresh.keys, tail.keys), (fresh.values, tail.values)])
    if fresh.queries is not None and tail.queries is not None:
        copy_rows([(fresh.queries, tail.queries)])  # of more heads, perhaps
    return tail


def _kinds(rows: Rows) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in walk_tensors(rows)]


def spliced(tail: Rows, fresh: Rows) -> Rows:
    """The tail with ``fresh`` laid over it, from anywhere inside it or right behind it."""
    offset = fresh.start - tail.start
    parts = [fresh]
    if offset:
        parts.insert(0, tail[:offset])
    if fresh.end < tail.end:
        parts.append(tail[fresh.end - tail.start :])
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.followed_by(part)
    return whole


def split(rows: Rows, count: int) -> tuple[Rows, Rows | None]:
    return rows[:count], (rows[count:] if count < rows.tokens else None)


def pieces(
    waiting: Rows | None, fresh: Rows, chunk_tokens: int | None
) -> tuple[list[Rows], Rows | None]:
    """Committed rows cut into chunks, and what is left waiting for more."""
    if chunk_tokens is None:
        return [fresh], None
    rows = fresh if waiting is None else waiting.followed_by(fresh)
    full = rows.tokens // chunk_tokens * chunk_tokens
    pieces = [rows[at : at + chunk_tokens] for at in range(0, full, chunk_tokens)]
    return pieces, (rows[full:] if full < rows.tokens else None)
