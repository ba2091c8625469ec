"""The Triton kernel: errors are found in registers and multiplied with both operands there.

In float32 multiply-adds: three TF32 products of so few columns cost more instructions (97 an
element of the kernel that packs, against 80). Kernels that have the errors in registers already do
the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.blocks import row_alignment
from videokv.kernels.gpu import on_device
from videokv.kernels.numbers import round_even
from videokv.kernels.subspace_iteration.layout import Directions

ROWS = 32
WARPS = 4
_COUNTS = ["x_b", "x_h", "heads", "tokens"]


def code_repair(
    keys: Tensor, decoded: Tensor, directions: Directions
) -> tuple[Tensor, Tensor, Tensor]:
    """See the package; the numbers of kept rows as a tensor, int32 ``[B H]``."""
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    batch, heads, tokens, size = keys.shape
    rank = directions.basis.shape[3]
    device = keys.device
    codes = torch.empty(batch, heads, tokens, rank, dtype=torch.int8, device=device)
    scales = torch.empty(batch, heads, tokens, 1, dtype=torch.float16, device=device)
    kept = torch.zeros(batch * heads, dtype=torch.int32, device=device)
    with on_device(device):
        _kernel[(-(-tokens // ROWS), batch * heads)](
            keys,
            *keys.stride()[:3],
            decoded.contiguous(),
            *(operand.contiguous() for operand in directions),
            codes,
            scales,
            kept,
            heads,
            tokens,
            ALIGN=row_alignment(keys),
            D=size,
            BD=max(16, 1 << (size - 1).bit_length()),
            BT=ROWS,
            RANK=rank,
            BR=columns(rank),
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return codes, scales, kept


def columns(rank: int) -> int:
    """Directions of the padded product, which has two columns for each and at least 16."""
    return max(8, 1 << (rank - 1).bit_length())


@triton.jit(do_not_specialize=_COUNTS)
def _kernel(
    x, x_b, x_h, x_t, decoded, basis, seen, quadratic, codes, scales, kept, heads, tokens,
    ALIGN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, RANK: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    live = token < tokens
    row = head * tokens + token
    channel = tl.arange(0, BD)
    inside = live[:, None] & (channel < D)[None, :]
    base = tl.multiple_of((head // heads) * x_b + (head % heads) * x_h, ALIGN)
    place = x + base + token[:, None].to(tl.int64) * x_t + channel[None, :]
    error = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    error -= tl.load(decoded + row[:, None] * D + channel[None, :], mask=inside, other=0.0)
    repair_rows(
        error, basis, seen, quadratic, codes, scales, kept, head, row, live, D, BD, BT, RANK, BR
    )


@triton.jit
def repair_rows(
    error, basis, seen, quadratic, codes, scales, kept, head, row, live,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Store what is kept of errors float32 [BT, BD] (0 outside), and count the rows of the head."""
    rank = tl.arange(0, BR)
    # Columns of the basis, each with what the moment makes of it beside it.
    channel = tl.arange(0, BD)[:, None]
    column = tl.arange(0, 2 * BR)[None, :]
    place = head * D * RANK + channel * RANK + column // 2
    inside = (channel < D) & (column < 2 * RANK)
    own = tl.load(basis + place, mask=inside & (column % 2 == 0), other=0.0).to(tl.float32)
    own += tl.load(seen + place, mask=inside & (column % 2 == 1), other=0.0)
    product = tl.dot(error, own, input_precision="ieee")
    exact, pulled = tl.split(tl.reshape(product, [BT, BR, 2]))

    largest = tl.max(tl.abs(exact), 1)
    scale = tl.minimum(largest / 127.0, 65504.0).to(tl.float16)
    wide = scale.to(tl.float32)
    inverse = tl.where(wide > 0, 1.0 / tl.maximum(wide, 1e-30), 0.0)
    code = round_even(exact * inverse[:, None])
    code = tl.minimum(tl.maximum(code, -127.0), 127.0)
    stored = code * wide[:, None]
    change = -2.0 * pulled
    for column in tl.static_range(RANK):
        line = head * RANK * RANK + column * RANK + rank
        form = tl.load(quadratic + line, mask=rank < RANK, other=0.0)
        weight = tl.sum(tl.where(rank[None, :] == column, stored, 0.0), 1)
        change += weight[:, None] * form[None, :]
    helps = tl.sum(change * stored, 1) < 0
    target = codes + row[:, None] * RANK + rank[None, :]
    code = tl.where(helps[:, None], code, 0.0).to(tl.int8)
    tl.store(target, code, mask=live[:, None] & (rank < RANK)[None, :])
    tl.store(scales + row, tl.where(helps, wide, 0.0).to(tl.float16), mask=live)
    tl.atomic_add(kept + head, tl.sum((helps & live).to(tl.int32), 0))
