"""The Triton kernel: a program for some rows of a head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.attend.tiles import padded
from videokv.kernels.gpu import on_device

ROWS = 16  # of a program
_COUNTS = ["p_p", "p_h", "p_m", "l_p", "l_h", "l_m", "parts", "rows"]


def merge_rows(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """See the package."""
    count, heads, rows, size = parts.shape
    out = parts.new_empty(1, heads, rows, size)
    lse = torch.empty(1, heads, rows, device=parts.device, dtype=torch.float32)
    with on_device(parts.device):
        _kernel[(triton.cdiv(rows, ROWS), heads)](
            parts, *parts.stride()[:3], lses, *lses.stride(), out, lse, count, rows,
            D=size, BD=padded(size), BM=ROWS, num_warps=4,
        )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=_COUNTS)
def _kernel(
    values, p_p, p_h, p_m, lses, l_p, l_h, l_m, out, lse, parts, rows,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    channel = tl.arange(0, BD)
    live = row < rows
    inside = live[:, None] & (channel < D)[None, :]
    at = head * p_h + row[:, None].to(tl.int64) * p_m + channel[None, :]
    line = head * l_h + row.to(tl.int64) * l_m
    peak = tl.full([BM], float("-inf"), tl.float32)
    place = line
    for _ in range(parts):
        found = tl.load(lses + place, mask=live, other=float("-inf"))
        place += l_p
        # Some kernels say +inf where a row saw no key.
        peak = tl.maximum(peak, tl.where(found == float("inf"), float("-inf"), found))
    base = tl.where(peak == float("-inf"), 0.0, peak)  # -inf - -inf would be NaN
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    for _ in range(parts):
        found = tl.load(lses + line, mask=live, other=float("-inf"))
        line += l_p
        share = tl.where(found == float("inf"), 0.0, tl.exp(found - base))
        block = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
        at += p_p
        # A row that saw no key there has whatever output.
        acc += tl.where((share > 0)[:, None], block * share[:, None], 0.0)
        total += share
    smallest: tl.constexpr = 1.1754943508222875e-38
    acc = acc / tl.maximum(total, smallest)[:, None]
    target = (head * rows + row)[:, None] * D + channel[None, :]
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + head * rows + row, base + tl.log(total), mask=live)
