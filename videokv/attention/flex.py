"""FlexAttention with the correction as a score_mod: the first paper's way, here to compare with.

The features of queries and keys are inputs of one compiled function, not constants of it: new
values, and new lengths, compile nothing more. All that ``score_mod`` looks at is a tensor: PyTorch
2.11 and 2.13 do not lower a Python number among its captures whose value the compiler knows (the
size of a group of heads) where lengths are dynamic. On the CPU FlexAttention runs uncompiled, which
materialises the scores: good for tests only, so "auto" never takes this backend.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from videokv.attention.adjacent import joined
from videokv.attention.columns import ColumnCall, score_columns
from videokv.protocols import Segment

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FlexBackend:
    """See the module."""

    name = "flex"

    def refusal(self, query: Tensor, segments: Sequence[Segment]) -> str | None:
        """Exact terms and float64."""
        if any(term.exact for s in segments for term in s.noise):
            return (
                "flex serves corrections that are columns; correction 'exact' is not: use "
                "backend='eager', or correction 'taylor' or 'cumulant'"
            )
        if query.dtype not in _DTYPES:
            return f"flex takes queries of {_DTYPES}, got {query.dtype}"
        return None

    def attend(
        self,
        query: Tensor,
        segments: Sequence[Segment],
        *,
        scale: float,
        causal: bool = False,
        need_lse: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """See ``AttentionBackend.attend``; the lse is float32."""
        call = ColumnCall(())
        for segment in segments:
            call = call.joined(segment)
        phi = omega = None
        if call.columns:
            phi, omega = score_columns(query, call, scale=scale)
            phi = phi * scale
        keys, values = joined([s.keys for s in segments]), joined([s.values for s in segments])
        first = None
        if causal:
            before = keys.shape[2] - segments[-1].keys.shape[2]
            first = torch.full((), before, dtype=torch.int32, device=query.device)
        out, lse = _function(query.device.type)(
            _power_of_two(query),
            _power_of_two(keys),
            _power_of_two(values),
            phi,
            omega,
            None if omega is None else _kv_heads(query.shape[1], keys.shape[1], query.device),
            scale,
            first,
        )
        return out[..., : values.shape[3]], lse if need_lse else None


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    phi: Tensor | None,
    omega: Tensor | None,
    kv_head: Tensor | None,
    scale: float,
    first: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output and natural-log lse of softmax(scale q k + phi . omega) v.

    phi float32 ``[B, Hq, M, F]`` (negative: it is added), omega float32 ``[B, Hkv, T, F]``;
    kv_head: int32 ``[Hq]``, the KV head of each query head, where there are columns. first: int32
    scalar, where causal: number of the key that query 0 sees last.
    """
    from torch.nn.attention.flex_attention import flex_attention

    columns = 0 if phi is None else phi.shape[3]

    def corrected(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        for column in range(columns):
            score = score + phi[b, h, m, column] * omega[b, kv_head[h], n, column]  # type: ignore
        if first is not None:
            score = torch.where(n <= m + first, score, -torch.inf)
        return score

    out, extra = flex_attention(
        query,
        keys,
        values,
        score_mod=corrected if columns or first is not None else None,
        scale=scale,
        enable_gqa=query.shape[1] > keys.shape[1],
        **_lse_request(),
    )
    return out, extra.lse if hasattr(extra, "lse") else extra


@functools.lru_cache(maxsize=16)
def _kv_heads(query_heads: int, heads: int, device: torch.device) -> Tensor:
    """The KV head of each query head, int32 ``[Hq]``."""
    return (torch.arange(query_heads, device=device) // (query_heads // heads)).int()


@functools.lru_cache(maxsize=4)
def _function(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compiled where there is a kernel to compile to."""
    if device_type == "cpu":
        return _uncompiled
    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(attention, dynamic=True)
    return compiled


def _uncompiled(*arguments: Any) -> tuple[Tensor, Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return attention(*arguments)


def _lse_request() -> dict:
    """How this PyTorch is asked for the log-sum-exp (``return_lse`` is on its way out)."""
    try:
        from torch.nn.attention.flex_attention import AuxRequest
    except ImportError:
        return {"return_lse": True}
    return {"return_aux": AuxRequest(lse=True)}


def _power_of_two(x: Tensor) -> Tensor:
    """Channels padded with zeros: older versions take powers of two only."""
    size = x.shape[3]
    wide = max(16, 1 << (size - 1).bit_length())
    return x if wide == size else pad(x, (0, wide - size))


BACKEND = FlexBackend()
