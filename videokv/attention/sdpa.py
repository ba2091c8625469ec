"""Corrected attention on stock kernels: the correction rides in columns appended to q and k.

No custom kernel and no score-sized tensor; the log-sum-exp is the kernel's own. Chunks with one
query map share columns; maps that together need more than 32 columns are served by one call per
group of maps, merged by log-sum-exp. causal=True is a call over the earlier segments, merged with
a causal one over the last.

Which kernel: where no segment was packed or carries noise, and no log-sum-exp is needed, the result
is, bit for bit, ``F.scaled_dot_product_attention(q, cat(k), cat(v), scale=scale)``, which a model
computes without a cache. Segments that were reconstructed from codes are no such promise: they get
the fastest stock kernel (``choose_kernel``), with noise or without.

Precision: float32 and float64 to the kernel's own rounding. In bfloat16 (float16) the correction is
off by at most 2^-7 (2^-10) of itself, next to the kernel's rounding; merged calls round their
outputs once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from videokv.attention.adjacent import joined
from videokv.attention.columns import ColumnCall, plan_calls, with_columns
from videokv.attention.merge import merge_parts
from videokv.attention.stock_kernels import KernelChoice, choose_kernel, round_up
from videokv.attention.waves import run_split, split_for
from videokv.protocols import Segment

_NO_EXACT = (
    "sdpa serves corrections that are columns; correction 'exact' is not: use backend='eager', or "
    "correction 'taylor' or 'cumulant'"
)


class SdpaBackend:
    """Appended columns and stock kernels: CPU, FlashAttention-4, cuDNN, flash, memory-efficient."""

    name = "sdpa"

    def refusal(self, query: Tensor, segments: Sequence[Segment]) -> str | None:
        """Exact terms, and sizes that no stock kernel of this device takes."""
        if _exact(segments):
            return _NO_EXACT
        found = _served(query, plan_calls(segments))
        return found if isinstance(found, str) else None

    def kernels(self, query: Tensor, segments: Sequence[Segment]) -> str:
        """In words, the kernel that a call without log-sum-exp runs (it is not refused)."""
        if not _approximate(segments):
            return "F.scaled_dot_product_attention as the model calls it: no row was packed"
        found = [_choice(query, call, causal=False) for call in plan_calls(segments)]
        names = dict.fromkeys(c.kernel for c in found if isinstance(c, KernelChoice))
        return f"stock kernel {' and '.join(names)}: there are packed rows"

    def attempt(
        self, query: Tensor, segments: Sequence[Segment], *, scale: float, need_lse: bool
    ) -> tuple[Tensor, Tensor | None] | str:
        """``attend``, or the reason of a ``refusal``; planned once for both."""
        if _exact(segments):
            return _NO_EXACT
        calls = plan_calls(segments)
        choices = _served(query, calls)
        if isinstance(choices, str):
            return choices
        if not need_lse and not _approximate(segments):
            return _plain(query, segments, scale=scale, causal=False), None
        parts = [
            _by(choice, query, call, scale=scale, causal=False)
            for call, choice in zip(calls, choices, strict=True)
        ]
        out, lse = parts[0] if len(parts) == 1 else merge_parts(parts)
        return out, lse if need_lse else None

    def attend(
        self,
        query: Tensor,
        segments: Sequence[Segment],
        *,
        scale: float,
        causal: bool = False,
        need_lse: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """See ``AttentionBackend.attend``; the lse is float64 for float64 inputs.

        Raises ValueError with the reason where no kernel can serve the call.
        """
        causal = causal and query.shape[2] > 1  # one row sees all of its segment
        split = causal and len(segments) > 1
        if not need_lse and not split and not _approximate(segments):
            return _plain(query, segments, scale=scale, causal=causal), None
        free = segments[:-1] if causal else segments
        parts = [_run(query, call, scale=scale, causal=False) for call in plan_calls(free)]
        if causal:
            last = ColumnCall(()).joined(segments[-1])
            parts.append(_run(query, last, scale=scale, causal=True))
        out, lse = parts[0] if len(parts) == 1 else merge_parts(parts)
        return out, lse if need_lse else None


def _exact(segments: Sequence[Segment]) -> bool:
    return any(term.exact for s in segments for term in s.noise)


def _served(query: Tensor, calls: Sequence[ColumnCall]) -> list[KernelChoice] | str:
    """A kernel for each call, or why there is none for one."""
    found = []
    for call in calls:
        choice = _choice(query, call, causal=False)
        if isinstance(choice, str):
            return _too_wide(query, call, choice) if call.columns else f"sdpa: {choice}"
        found.append(choice)
    return found


def _approximate(segments: Sequence[Segment]) -> bool:
    """Whether any segment was packed, or has its scores corrected."""
    return any(s.packed or s.noise for s in segments)


def _too_wide(query: Tensor, call: ColumnCall, reason: str) -> str:
    return (
        f"sdpa appends {call.columns} columns to head size {query.shape[3]}, but {reason}; use a "
        "larger group_size of the quantizer, or backend='eager'"
    )


def _plain(query: Tensor, segments: Sequence[Segment], *, scale: float, causal: bool) -> Tensor:
    keys, values = joined([s.keys for s in segments]), joined([s.values for s in segments])
    repeats = query.shape[1] // keys.shape[1]
    fused = query.dtype in (torch.bfloat16, torch.float16) and keys.shape[3] == values.shape[3]
    if repeats > 1 and query.device.type == "cuda" and not fused:
        # Only the math kernel takes grouped heads here, and it materialises the scores.
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        repeats = 1
    return functional.scaled_dot_product_attention(
        query, keys, values, scale=scale, is_causal=causal, enable_gqa=repeats > 1
    )


def _choice(query: Tensor, call: ColumnCall, *, causal: bool) -> KernelChoice | str:
    first = call.segments[0]
    return choose_kernel(
        device=query.device,
        dtype=query.dtype,
        head_dim=round_up(query.shape[3] + call.columns, _multiple(query, call)),
        value_dim=first.values.shape[3],
        heads_per_kv=query.shape[1] // first.keys.shape[1],
        rows=query.shape[2],
        tokens=sum(s.keys.shape[2] for s in call.segments),
        causal=causal,
    )


def _multiple(query: Tensor, call: ColumnCall) -> int:
    """Widths that kernels like: with columns, multiples of 16 are the faster ones on a GPU."""
    return 16 if call.columns and query.device.type == "cuda" else 8


def _run(query: Tensor, call: ColumnCall, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """One kernel call: output ``[B, Hq, M, Dv]`` and lse ``[B, Hq, M]``."""
    choice = _choice(query, call, causal=causal)
    if isinstance(choice, str):
        raise ValueError(f"backend 'sdpa' cannot serve this call: {choice}; use backend='eager'")
    return _by(choice, query, call, scale=scale, causal=causal)


def _by(
    choice: KernelChoice, query: Tensor, call: ColumnCall, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    wide_query, wide_keys = with_columns(query, call, scale=scale, width=choice.head_dim)
    values = joined([s.values for s in call.segments])
    value_dim = values.shape[3]
    if choice.value_dim > value_dim:
        values = functional.pad(values, (0, choice.value_dim - value_dim))
    split = None if causal else split_for(choice.kernel, wide_query, wide_keys, values)
    if split is None:
        out, lse = choice.run(wide_query, wide_keys, values, scale=scale, causal=causal)
    else:
        out, lse = run_split(choice.run, wide_query, wide_keys, values, split, scale=scale)
    return out[..., :value_dim], lse


BACKEND = SdpaBackend()
