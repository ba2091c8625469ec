"""The Triton kernel: a program for some rows of a head, of those to copy or of those to merge."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.attend.tiles import padded
from videokv.kernels.gpu import on_device
from videokv.kernels.grids import cdiv
from videokv.kernels.launches import alike

ROWS = 16  # of a program
_COUNTS = ["f_h", "f_m", "g_h", "g_m", "p_p", "p_h", "p_m", "l_p", "l_h", "l_m"]
_COUNTS += ["parts", "first_rows", "last_rows", "first_programs"]


def merge_tail(
    first: Tensor, first_lse: Tensor, parts: Tensor, lses: Tensor
) -> tuple[Tensor, Tensor]:
    """See the package."""
    count, heads, last_rows, size = parts.shape
    first_rows = first.shape[2]
    out = parts.new_empty(1, heads, first_rows + last_rows, size)
    lse = torch.empty(1, heads, first_rows + last_rows, device=parts.device, dtype=torch.float32)
    first_programs = cdiv(first_rows, ROWS)
    grid = (first_programs + cdiv(last_rows, ROWS), heads)
    constants = {"D": size, "BD": padded(size), "BM": ROWS, "num_warps": 4}
    with on_device(parts.device):
        alike(_kernel, grid, parts.device, **constants)(
            first, *first.stride()[1:3], first_lse, *first_lse.stride()[1:],
            parts, *parts.stride()[:3], lses, *lses.stride(),
            out, lse, count, first_rows, last_rows, first_programs,
        )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=_COUNTS)
def _kernel(
    first, f_h, f_m, first_lse, g_h, g_m, values, p_p, p_h, p_m, lses, l_p, l_h, l_m,
    out, lse, parts, first_rows, last_rows, first_programs,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BD)
    place = head * (first_rows + last_rows)
    if tl.program_id(0) < first_programs:
        row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
        live = row < first_rows
        inside = live[:, None] & (channel < D)[None, :]
        at = head * f_h + row[:, None] * f_m + channel[None, :]
        copied = tl.load(first + at, mask=inside, other=0.0)
        tl.store(out + (place + row)[:, None] * D + channel[None, :], copied, mask=inside)
        sums = tl.load(first_lse + head * g_h + row * g_m, mask=live, other=0.0)
        tl.store(lse + place + row, sums, mask=live)
    else:
        row = ((tl.program_id(0) - first_programs) * BM + tl.arange(0, BM)).to(tl.int64)
        live = row < last_rows
        inside = live[:, None] & (channel < D)[None, :]
        at = head * p_h + row[:, None] * p_m + channel[None, :]
        line = head * l_h + row * l_m
        peak = tl.full([BM], float("-inf"), tl.float32)
        for part in range(parts):
            found = tl.load(lses + line + part * l_p, mask=live, other=float("-inf"))
            # Some kernels say +inf where a row saw no key.
            peak = tl.maximum(peak, tl.where(found == float("inf"), float("-inf"), found))
        base = tl.where(peak == float("-inf"), 0.0, peak)  # -inf - -inf would be NaN
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BD], tl.float32)
        for _ in range(parts):
            found = tl.load(lses + line, mask=live, other=float("-inf"))
            share = tl.where(found == float("inf"), 0.0, tl.exp(found - base))
            block = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
            # A row that saw no key there has whatever output.
            acc += tl.where((share > 0)[:, None], block * share[:, None], 0.0)
            total += share
            line += l_p
            at += p_p
        smallest: tl.constexpr = 1.1754943508222875e-38
        # Not a maximum, which loses NaN.
        acc = acc / tl.where(total < smallest, smallest, total)[:, None]
        place += first_rows
        target = (place + row)[:, None] * D + channel[None, :]
        tl.store(out + target, acc.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + place + row, base + tl.log(total), mask=live)
