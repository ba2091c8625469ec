"""The oracle: scores are materialised and corrected, then one softmax over all segments.

Float32 arithmetic (float64 for float64 inputs), in blocks of query rows so that the scores of one
block stay under a fixed size. The only backend that also does the exact correction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from videokv.attention.sinhc import log_sinhc
from videokv.noise import ScoreNoise
from videokv.protocols import Segment

SCORE_BLOCK_ELEMENTS = 2**26


class EagerBackend:
    """softmax(scale q k^T - b) v, written out."""

    name = "eager"

    def refusal(self, query: Tensor, segments: Sequence[Segment]) -> str | None:
        """None: it serves every call that passes the checks."""
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
        """See ``AttentionBackend.attend``; the lse is float64 for float64 inputs."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        raised = [Segment(s.keys.to(dtype), s.values.to(dtype), s.noise) for s in segments]
        tokens = sum(s.keys.shape[2] for s in raised)
        rows = max(1, SCORE_BLOCK_ELEMENTS // max(1, query.shape[0] * query.shape[1] * tokens))
        outputs, lses = [], []
        for start in range(0, query.shape[2], rows):
            block = query[:, :, start : start + rows].to(dtype)
            out, lse = _attend_rows(block, raised, scale, start if causal else None)
            outputs.append(out)
            lses.append(lse)
        return torch.cat(outputs, 2).to(query.dtype), torch.cat(lses, 2) if need_lse else None


def _attend_rows(
    query: Tensor, segments: Sequence[Segment], scale: float, first_row: int | None
) -> tuple[Tensor, Tensor]:
    """Rows ``[B, Hq, M, D]`` over all keys; ``first_row``: their place, where causal."""
    scores = [_corrected_scores(query, s, scale) for s in segments]
    if first_row is not None:
        rows = torch.arange(query.shape[2], device=query.device) + first_row
        columns = torch.arange(scores[-1].shape[3], device=query.device)
        scores[-1] = scores[-1].masked_fill(columns > rows[:, None], -torch.inf)
    joined = torch.cat(scores, -1)  # [B, Hq, M, T of all segments]
    lse = torch.logsumexp(joined, -1)
    values = torch.cat([s.values for s in segments], 2)
    return _grouped_matmul(torch.exp(joined - lse.unsqueeze(-1)), values), lse


def _corrected_scores(query: Tensor, segment: Segment, scale: float) -> Tensor:
    """scale q k^T - b: ``[B, Hq, M, T]``."""
    scores = _grouped_matmul(query, segment.keys.transpose(-1, -2)) * scale
    for term in segment.noise:
        scores = scores - score_bias(query, term, scale=scale)
    return scores


def score_bias(query: Tensor, term: ScoreNoise, *, scale: float) -> Tensor:
    """b of one term, ``[B, Hq, M, T]`` (T is 1 where the weights have one row for all tokens)."""
    if term.exact:
        return _exact_bias(query, term, scale=scale)
    phi = term.query_map.features(query, scale=scale)  # [B, Hq, M, F]
    weights = term.weights.to(phi.dtype).expand(*term.weights.shape[:3], phi.shape[3])
    return _grouped_matmul(phi, weights.transpose(-1, -2))


def _exact_bias(query: Tensor, term: ScoreNoise, *, scale: float) -> Tensor:
    """Sum over channels of log(sinh(a)/a), one channel at a time: no ``[M, T, D]`` tensor.

    Negative weights (no quantizer has them) count with the opposite sign, as in Taylor's form.
    """
    mapped = term.query_map.mapped(query)  # [B, Hq, M, D]
    weights = term.weights.to(mapped.dtype)
    weights = weights.repeat_interleave(mapped.shape[1] // weights.shape[1], 1)
    steps, signs = weights.abs().sqrt() * (scale / 2), torch.sign(weights)
    total = mapped.new_zeros(*mapped.shape[:3], weights.shape[2])
    for channel in range(mapped.shape[3]):
        group = channel // term.query_map.group_size if weights.shape[3] > 1 else 0
        step, sign = (x[:, :, None, :, group] for x in (steps, signs))
        total += sign * log_sinhc(mapped[..., channel, None] * step)
    return total


def _grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """``[B, Hq, M, K] @ [B, Hkv, K, N] -> [B, Hq, M, N]``, query heads of a KV head together."""
    batch, heads, rows, inner = left.shape
    folded = left.reshape(batch, right.shape[1], -1, inner) @ right
    return folded.reshape(batch, heads, rows, -1)


BACKEND = EagerBackend()
