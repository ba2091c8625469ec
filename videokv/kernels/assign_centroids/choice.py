"""QSAC's choice of a centroid, written out: the oracle of its kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from videokv.kernels.assign_centroids.layout import gather_centroids
from videokv.kernels.assign_centroids.reference import nearest
from videokv.kernels.gpu import CannotCheck, checked_refusal

_TOKENS = 1000  # that a check looks at: more than one program takes


def choose_by_range(
    x: Tensor, table: Tensor, moment: Tensor, *, group_size: int, candidates: int
) -> Tensor:
    """See the package; float32 tensors, int64 labels ``[B, H, T]``."""
    weights = channel_weights(moment)
    lens = weights.sqrt().unsqueeze(2)
    near = nearest(x * lens, table * lens, count=candidates).sort(-1).values
    scores = torch.stack(
        [range_scores(x, table, label, weights, group_size) for label in near.unbind(-1)], -1
    )
    return near.gather(-1, scores.argmin(-1, keepdim=True))[..., 0]


def channel_weights(moment: Tensor) -> Tensor:
    """Mean squared query of each channel over the mean of all (2609.26425, Eq. 8): ``[B, H, D]``
    float32 of ``moment`` ``[B, H, D, D]``."""
    diagonal = moment.float().diagonal(dim1=-2, dim2=-1).clamp(min=0)
    # In float64, so that it does not follow the number of rows that a GPU adds up at once.
    mean = diagonal.mean(-1, keepdim=True, dtype=torch.float64).float()
    return torch.where(mean > 0, diagonal / mean, 1.0)


def range_scores(
    x: Tensor, table: Tensor, labels: Tensor, weights: Tensor, group_size: int
) -> Tensor:
    """Weighted squared ranges of the residual of each token ``[B, H, T]``."""
    residual = (x - gather_centroids(table, labels)).unflatten(-1, (-1, group_size))
    spread = residual.amax(-1) - residual.amin(-1)
    group_weights = weights.unflatten(-1, (-1, group_size)).sum(-1)
    return (spread.square() * group_weights[:, :, None]).sum(-1)


def refusal(
    x: Tensor, table: Tensor, moment: Tensor, *, group_size: int, candidates: int
) -> str | None:
    """Why the kernel does not serve this, or None; a first use is checked here."""
    if group_size & (group_size - 1):
        return f"groups of {group_size} are no power of two"
    config = (x.shape[3], x.dtype, group_size, candidates, table.shape[2], table.dtype)
    options: dict[str, Any] = {"group_size": group_size, "candidates": candidates}

    def check() -> str | None:
        from videokv.kernels.assign_centroids import triton

        some = x[:, :, torch.arange(_TOKENS, device=x.device) % x.shape[2]]
        tokens, rows, eye = (t.detach()[:2, :2].contiguous() for t in (some, table, moment))
        got = triton.choose_by_range(tokens, rows, eye, **options)
        tokens, rows = tokens.float(), rows.float()
        want = choose_by_range(tokens, rows, eye, **options)
        scores = [
            range_scores(tokens, rows, label, channel_weights(eye), group_size).sum()
            for label in (got.long(), want)
        ]
        if not bool(scores[1].isfinite()):
            raise CannotCheck("tokens that are not finite check no kernel")
        worse = float(scores[0] / scores[1].clamp(min=1e-30))
        return None if worse <= 1.01 else f"self-check failed: ranges {worse:.3f} of the best"

    return checked_refusal("choose_by_range", config, x.device, check)
