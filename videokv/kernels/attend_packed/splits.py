"""What the kernels share: how tokens are split over programs, and the columns as they are read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from videokv.kernels.attend.tiles import padded
from videokv.kernels.attend_packed.call import PackedCall

BLOCK_TOKENS = 64
PROGRAMS = 512  # enough to fill a large GPU; more would only be merged again
LOG2_E = 1.4426950408889634


def stretch_of(tokens: int, heads: int) -> int:
    """Tokens of a program: whole blocks, the same for lengths near one another."""
    splits = max(1, min(-(-tokens // BLOCK_TOKENS), PROGRAMS // heads))
    return -(-tokens // splits // BLOCK_TOKENS) * BLOCK_TOKENS


def columns(call: PackedCall) -> tuple[Tensor | None, Tensor | None]:
    """Columns of the correction padded, FP16 for 16-bit queries."""
    if call.extra_query is None or call.extra_keys is None:
        return None, None
    missing = padded(call.columns) - call.columns
    dtype = torch.float32 if call.query.dtype == torch.float32 else torch.float16
    # FP16: the largest weight of a column becomes 1, so that small ones stay normal numbers.
    peak = call.extra_keys.abs().amax(2, keepdim=True).clamp(min=1e-30)
    repeats = call.query.shape[1] // call.keys.shape[1]
    pair = (call.extra_query * peak.repeat_interleave(repeats, 1), call.extra_keys / peak)
    extra_query, extra_keys = (pad(x, (0, missing)).to(dtype).contiguous() for x in pair)
    return extra_query, extra_keys
