"""The Triton kernel: a program copies a block of tokens of one head of one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.blocks import as_bytes
from videokv.kernels.gpu import on_device
from videokv.kernels.grids import cdiv, next_power_of_2
from videokv.kernels.launches import alike

ELEMENTS = 2048  # of a block
WARPS = 4
MOST_PAIRS = 4  # of a launch
_COUNTS = [
    f"{name}{pair}" for pair in range(MOST_PAIRS) for name in ("tokens", "x_b", "x_h", "y_b", "y_h")
]


def copy_rows(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """See the package; up to four pairs that the kernel takes."""
    first = pairs[0][0]
    batch, heads = first.shape[:2]
    arguments: list[Any] = [heads]
    sizes, longest = [], 0
    align = 16  # what offsets of heads are multiples of: how wide loads may be
    for source, out in pairs:
        _, _, tokens, size = source.shape
        x_b, x_h, x_t, _ = source.stride()
        y_b, y_h, y_t, _ = out.stride()
        arguments += (tokens, as_bytes(source), x_b, x_h, x_t, as_bytes(out), y_b, y_h, y_t)
        if batch > 1:
            align = math.gcd(align, x_b, y_b)
        if heads > 1:
            align = math.gcd(align, x_h, y_h)
        longest = max(longest, tokens)
        sizes.append(size)
    missing = MOST_PAIRS - len(pairs)
    arguments += [0, None, 0, 0, 0, None, 0, 0, 0] * missing
    block = next_power_of_2(max(sizes))
    rows = max(1, ELEMENTS // block)
    grid = (cdiv(longest, rows), batch * heads, len(pairs))
    constants = {f"D{pair}": size for pair, size in enumerate([*sizes, *[0] * missing])}
    constants |= {"BD": block, "BT": rows, "ALIGN": align, "num_warps": WARPS}
    with on_device(first.device):
        alike(_copy, grid, first.device, **constants)(*arguments)


@triton.jit(do_not_specialize=["heads", *_COUNTS])
def _copy(
    heads,
    tokens0, x0, x_b0, x_h0, x_t0, y0, y_b0, y_h0, y_t0,
    tokens1, x1, x_b1, x_h1, x_t1, y1, y_b1, y_h1, y_t1,
    tokens2, x2, x_b2, x_h2, x_t2, y2, y_b2, y_h2, y_t2,
    tokens3, x3, x_b3, x_h3, x_t3, y3, y_b3, y_h3, y_t3,
    D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    # A pair that is not there has no pointers: its branch is left out by a constant of its own.
    pair = tl.program_id(2)
    if pair == 0:
        _block(tokens0, x0, x_b0, x_h0, x_t0, y0, y_b0, y_h0, y_t0, heads, D0, BD, BT, ALIGN)
    if D1 > 0:  # noqa: SIM102
        if pair == 1:
            _block(tokens1, x1, x_b1, x_h1, x_t1, y1, y_b1, y_h1, y_t1, heads, D1, BD, BT, ALIGN)
    if D2 > 0:  # noqa: SIM102
        if pair == 2:
            _block(tokens2, x2, x_b2, x_h2, x_t2, y2, y_b2, y_h2, y_t2, heads, D2, BD, BT, ALIGN)
    if D3 > 0:  # noqa: SIM102
        if pair == 3:
            _block(tokens3, x3, x_b3, x_h3, x_t3, y3, y_b3, y_h3, y_t3, heads, D3, BD, BT, ALIGN)


@triton.jit
def _block(
    tokens, x, x_b, x_h, x_t, y, y_b, y_h, y_t, heads,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(1).to(tl.int64)
    batch, head = line // heads, line % heads
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    channel = tl.arange(0, BD)
    inside = (token < tokens)[:, None] & (channel < D)[None, :]
    rows = token[:, None].to(tl.int64)
    source = x + tl.multiple_of(batch * x_b + head * x_h, ALIGN)
    target = y + tl.multiple_of(batch * y_b + head * y_h, ALIGN)
    held = tl.load(source + rows * x_t + channel[None, :], mask=inside)
    tl.store(target + rows * y_t + channel[None, :], held, mask=inside)
