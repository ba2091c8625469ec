"""The Triton kernel that readies queries for unbiased chunks: rotated, and met by the centroids."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.attend.tiles import padded
from videokv.kernels.attend_packed.call import PackedCall
from videokv.kernels.blocks import as_bytes
from videokv.kernels.gpu import on_device
from videokv.kernels.grids import cdiv
from videokv.kernels.launches import alike
from videokv.kernels.numbers import e4m3_halves

LABELS = 16  # of a padded table, zero among them
BLOCK_ROWS = 16
WARPS = 4


def ready(call: PackedCall) -> tuple[Tensor, Tensor, Tensor]:
    """Of every query row: itself, rotated ``[rows, D]``; its scores with the centroids
    ``[rows, C]``; float32 ``[3, rows]``: what these two are multiplied by, and minus its feature
    of the correction by steps over scale.

    For 16-bit queries both are FP16, the scores as two halves side by side (2^-22), C = 32; else
    float32, C = 16.
    """
    rotation, centres = call.keys.rotation, call.keys.centres
    assert rotation is not None and centres is not None
    batch, heads, queries, size = call.query.shape
    rows = batch * heads * queries
    wide = call.query.dtype == torch.float32
    kind = torch.float32 if wide else torch.float16
    device = call.query.device
    turned = torch.empty(rows, size, dtype=kind, device=device)
    scores = torch.empty(rows, LABELS if wide else 2 * LABELS, dtype=kind, device=device)
    numbers = torch.empty(3, rows, device=device)
    block = min(BLOCK_ROWS, padded(call.rows))
    run = alike(
        _kernel,
        (cdiv(call.rows, block), rows // call.rows),
        device,
        D=size,
        BD=padded(size),
        BM=block,
        WIDE=wide,
        PRECISION="tf32x3" if device.type == "cuda" else "ieee",
        num_warps=WARPS,
    )
    with on_device(device):
        run(
            call.query.contiguous(),
            rotation.matrix(device=device),
            as_bytes(centres.table.contiguous()),
            centres.scale.contiguous(),
            call.factors,
            turned,
            scores,
            numbers,
            centres.table.shape[2],
            call.rows,
            rows,
            call.scale / 24,
        )
    return turned, scores, numbers


@triton.jit(do_not_specialize=["count", "rows", "all_rows", "feature_scale"])
def _kernel(
    q, matrix, table, table_scale, factors, turned, scores, numbers, count, rows, all_rows,
    feature_scale, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    asked = row < rows
    line = head * rows + row
    channel = tl.arange(0, BD)
    inside = asked[:, None] & (channel < D)[None, :]
    place = line[:, None] * D + channel[None, :]
    block = tl.load(q + place, mask=inside, other=0.0).to(tl.float32)

    label = tl.arange(0, 16)
    known = (label > 0) & (label <= count)
    at = (head * count + label - 1)[None, :] * D + channel[:, None]
    held = known[None, :] & (channel < D)[:, None]
    means = e4m3_halves(tl.load(table + at, mask=held, other=0)).to(tl.float32)
    means *= tl.load(table_scale + head)
    found = tl.dot(block, means, input_precision=PRECISION)
    target = scores + line[:, None] * (16 if WIDE else 32) + label[None, :]
    if WIDE:
        tl.store(target, found, mask=asked[:, None])
        peak = tl.full([BM], 1.0, tl.float32)
    else:
        peak = tl.maximum(tl.max(tl.abs(found), 1), 1e-30)
        ratio = found / peak[:, None]
        high = ratio.to(tl.float16)
        tl.store(target, high, mask=asked[:, None])
        low = (ratio - high.to(tl.float32)).to(tl.float16)
        tl.store(target + 16, low, mask=asked[:, None])
    tl.store(numbers + all_rows + line, peak, mask=asked)

    square = (channel < D)[:, None] & (channel < D)[None, :]
    turn = tl.load(matrix + channel[None, :] * D + channel[:, None], mask=square, other=0.0)
    block = tl.dot(block, turn, input_precision=PRECISION)
    phi = tl.sum(block * block, 1) * -feature_scale
    if factors is not None:
        phi *= tl.load(factors + head)
    tl.store(numbers + 2 * all_rows + line, phi, mask=asked)
    peak = tl.full([BM], 1.0, tl.float32)
    if not WIDE:
        peak = tl.maximum(tl.max(tl.abs(block), 1), 1e-30)
        block = block / peak[:, None]
    tl.store(numbers + line, peak, mask=asked)
    tl.store(turned + place, block.to(turned.dtype.element_ty), mask=inside)
