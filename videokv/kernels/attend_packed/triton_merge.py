"""The Triton kernel that merges the splits of a call, and what was found before, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.attend.tiles import padded
from videokv.kernels.attend_packed.call import Current
from videokv.kernels.blocks import as_bytes
from videokv.kernels.gpu import on_device
from videokv.kernels.grids import cdiv
from videokv.kernels.launches import alike
from videokv.kernels.numbers import e4m3_halves
from videokv.kernels.quantize_unbiased.layout import Centres
from videokv.rotation import Rotation

SPLITS, TURNED_SPLITS = 128, 32  # read at once, without and with a rotation
CURRENT = 16  # current rows at once
CHANNELS = 32  # of a program, where outputs are not rotated back
WARPS = 4
_COUNTS = ["other_b", "other_h", "other_m", "centroids", "sharers", "splits", "rows", "heads"]
_COUNTS += ["count", "k_b", "k_h", "k_n", "v_b", "v_h", "v_n", "repeats", "current", "scale"]


def merge(
    parts: Tensor,
    lses: Tensor,
    like: Tensor,
    *,
    other: tuple[Tensor, Tensor] | Current | None = None,
    rotation: Rotation | None = None,
    labels: tuple[Tensor, Centres] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """parts float32 ``[S, rows, Dv]`` and lses ``[S, rows]`` to one output ``[B, Hq, M, Dv]`` of
    ``dtype`` and its lse float32; rows are those of ``like`` ``[B, Hq, M, D]``.

    rotation: undone on the merged parts. labels: weights by label float32 ``[S, rows, 16]`` and the
    centroids they are of, added after that. other: (output, lse) of other keys, merged after that,
    or current rows, attended to here: ``like`` is then the query.
    """
    batch, heads, queries, _ = like.shape
    splits, rows, size = parts.shape
    out = torch.empty(batch, heads, queries, size, dtype=dtype, device=parts.device)
    lse = torch.empty(batch, heads, queries, device=parts.device)
    matrix, block = None, min(CHANNELS, padded(size))
    if rotation is not None:
        matrix, block = rotation.matrix(device=parts.device), padded(size)
    masses, table, table_scale, count, sharers = None, None, None, 1, 1
    if labels is not None:
        masses, centres = labels
        table, table_scale = as_bytes(centres.table.contiguous()), centres.scale.contiguous()
        count, sharers = table.shape[2], rows // (batch * table.shape[1])
    output, other_lse = (None, None) if other is None or isinstance(other, Current) else other
    if output is not None and output.stride(3) != 1:
        output = output.contiguous()
    current, key, value, asked = None, None, None, None
    if isinstance(other, Current):
        current, asked = other, like.contiguous()
        key, value = _along_rows(other.key), _along_rows(other.value)
    run = alike(
        _kernel, (rows, cdiv(size, block)), parts.device,
        D=size, BD=block, BS=SPLITS if rotation is None else TURNED_SPLITS,
        QD=like.shape[3], BQ=padded(like.shape[3]), BN=CURRENT,
        CAUSAL=current is not None and current.causal,
        num_warps=WARPS if rotation is None else 2 * WARPS,
    )  # fmt: skip
    with on_device(parts.device):
        run(
            parts, lses, output, *((0, 0, 0) if output is None else output.stride()[:3]),
            other_lse if other_lse is None else other_lse.contiguous(),
            asked, key, value, *_steps(key), *_steps(value),
            1 if key is None else heads // key.shape[1],
            1 if key is None else key.shape[2], 0.0 if current is None else current.scale,
            matrix, masses, table, table_scale, count, sharers, out, lse, splits, rows, heads,
            queries,
        )  # fmt: skip
    return out, lse


def _along_rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _steps(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


@triton.jit(do_not_specialize=_COUNTS)
def _kernel(
    parts, lses, other, other_b, other_h, other_m, other_lse,
    q, k, v, k_b, k_h, k_n, v_b, v_h, v_n, repeats, current, scale,
    matrix, masses, table, table_scale,
    centroids, sharers, out, lse, splits, rows, heads, count, D: tl.constexpr, BD: tl.constexpr,
    BS: tl.constexpr, QD: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = channel < D
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([BD], tl.float32)
    label = tl.arange(0, 16)
    mass = tl.zeros([16], tl.float32)
    for first in range(0, splits, BS):
        split = first + tl.arange(0, BS)
        live = split < splits
        line = split * rows + row
        found = tl.load(lses + line, mask=live, other=float("-inf"))
        place = line[:, None] * D + channel[None, :]
        block = tl.load(parts + place, mask=live[:, None] & inside[None, :], other=0.0)
        higher = tl.maximum(peak, tl.max(found, 0))
        share = tl.exp(found - higher)
        shrink = tl.exp(peak - higher)
        acc = acc * shrink + tl.sum(block * share[:, None], 0)
        if masses is not None:
            place = line[:, None] * 16 + label[None, :]
            block = tl.load(masses + place, mask=live[:, None], other=0.0)
            mass = mass * shrink + tl.sum(block * share[:, None], 0)
        total = total * shrink + tl.sum(share, 0)
        peak = higher
    if matrix is not None:
        source = tl.arange(0, BD)
        square = matrix + source[:, None] * D + channel[None, :]
        turn = tl.load(square, mask=(source < D)[:, None] & inside[None, :], other=0.0)
        acc = tl.sum(acc[:, None] * turn, 0)
    if masses is not None:
        head = row // sharers
        place = (head * centroids + label - 1)[:, None] * D + channel[None, :]
        held = ((label > 0) & (label <= centroids))[:, None] & inside[None, :]
        centre = e4m3_halves(tl.load(table + place, mask=held, other=0)).to(tl.float32)
        acc += tl.sum(mass[:, None] * centre, 0) * tl.load(table_scale + head)
    if other is not None:
        batch = row // (heads * count)
        head = row // count % heads
        base = other + batch * other_b + head * other_h + (row % count) * other_m
        found = tl.load(other_lse + row).to(tl.float32)
        higher = tl.maximum(peak, found)
        share = tl.exp(found - higher)
        shrink = tl.exp(peak - higher)
        more = tl.load(base + channel, mask=inside, other=0.0).to(tl.float32)
        # A row that sees no key there has whatever output.
        acc = acc * shrink + tl.where(share > 0, more * share, 0.0)
        total = total * shrink + share
        peak = higher
    if q is not None:
        batch = row // (heads * count)
        head = row // count % heads // repeats
        source = tl.arange(0, BQ)
        query = tl.load(q + row * QD + source, mask=source < QD, other=0.0).to(tl.float32) * scale
        seen = current
        if CAUSAL:
            seen = (row % count + 1).to(tl.int32)
        for first in range(0, seen, BN):
            token = first + tl.arange(0, BN)
            live = token < seen
            base = k + batch * k_b + head * k_h + token.to(tl.int64)[:, None] * k_n
            held = live[:, None] & (source < QD)[None, :]
            block = tl.load(base + source[None, :], mask=held, other=0.0).to(tl.float32)
            found = tl.where(live, tl.sum(block * query[None, :], 1), float("-inf"))
            higher = tl.maximum(peak, tl.max(found, 0))
            share = tl.exp(found - higher)
            shrink = tl.exp(peak - higher)
            base = v + batch * v_b + head * v_h + token.to(tl.int64)[:, None] * v_n
            held = live[:, None] & inside[None, :]
            block = tl.load(base + channel[None, :], mask=held, other=0.0).to(tl.float32)
            acc = acc * shrink + tl.sum(block * share[:, None], 0)
            total = total * shrink + tl.sum(share, 0)
            peak = higher
    tl.store(out + row * D + channel, (acc / total).to(out.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(lse + row, peak + tl.log(total))
