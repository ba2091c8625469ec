"""What the kernels share: how tokens are split over programs, and the columns as they are read."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from videokv.kernels.attend.tiles import padded
from videokv.kernels.attend_packed.call import PackedCall

BLOCK_TOKENS = 64
PROGRAMS = 512  # enough to fill a large GPU; more would only be merged again
LOG2_E = 1.4426950408889634
FAST_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 3e-3}  # of kernels in Gluon


def stretch_of(tokens: int, heads: int) -> int:
    """Tokens of a program: whole blocks, the same for lengths near one another."""
    splits = max(1, min(-(-tokens // BLOCK_TOKENS), PROGRAMS // heads))
    return -(-tokens // splits // BLOCK_TOKENS) * BLOCK_TOKENS


def columns(call: PackedCall) -> tuple[Tensor | None, Tensor | None]:
    """Columns of the correction as the kernels read them: float32 for BF16 and float32 queries
    (BF16 once read, for BF16), balanced FP16 for FP16."""
    if call.extra_query is None or call.extra_keys is None:
        return None, None
    if call.query.dtype != torch.float16:
        return call.extra_query.contiguous(), call.extra_keys.contiguous()
    # FP16: the largest weight of a column becomes 1, so that small ones stay normal numbers.
    peak = call.extra_keys.abs().amax(2, keepdim=True).clamp(min=1e-30)
    repeats = call.query.shape[1] // call.keys.shape[1]
    query = call.extra_query * peak.repeat_interleave(repeats, 1)
    return query.half().contiguous(), (call.extra_keys / peak).half().contiguous()


def column_options(call: PackedCall) -> dict:
    """Constants of the kernels: columns, columns padded for a product (0: none), and its dtype."""
    kinds = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    count = 0 if call.extra_query is None else call.extra_query.shape[3]
    return {
        "F": count,
        "BF": padded(count) if count else 0,
        "COLUMN_TYPE": kinds.get(call.query.dtype, tl.float32),
    }


def in_pairs(query: Tensor) -> bool:
    """Whether two values of 16 bits are handled at once, by instructions of the GPU."""
    return query.is_cuda and query.dtype != torch.float32


def is_hopper(device: torch.device) -> bool:
    """Whether a GPU has products of 64 rows whose operands lie in shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def joined(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Parts ``[S, rows, D]`` with lses ``[S, rows]`` as one: ``[rows, D]`` and ``[rows]``."""
    total = lses.logsumexp(0)
    return ((lses - total).exp().unsqueeze(-1) * parts).sum(0), total
