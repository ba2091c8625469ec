"""2-bit codes around an integer zero point, with one FP16 scale a head and one byte a group.

    Delta = c s,   c = clamp(rint((max - min) / 3 / s), 1, 255),   s = max over groups / 3 / 255
    zero = clamp(rint(-min / Delta), 0, 3),   code = clamp(rint(x / Delta) + zero, 0, 3)

with 0 inside [min, max] (2609.26425). Centroids can be subtracted first. On a GPU two kernels: one
finds the widest range of each head, one encodes; both read the tokens in their own dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from videokv.kernels.assign_centroids.layout import Clusters
from videokv.kernels.gpu import (
    CannotCheck,
    checked_refusal,
    machine_refusal,
    say_once,
    wants_kernels,
)
from videokv.kernels.quantize_two_level import reference
from videokv.kernels.quantize_two_level.layout import BITS, TOP, TwoLevelCodes, head_scale

__all__ = [
    "BITS",
    "TOP",
    "TwoLevelCodes",
    "TwoLevelInput",
    "head_scale",
    "kernel_refusal",
]


class TwoLevelInput:
    """Tokens ``[B, H, T, D]`` (less the centroids of ``clusters``), about to be encoded.

    ``widest`` is known before the codes, so that a caller can refuse what cannot be stored.
    """

    def __init__(self, x: Tensor, clusters: Clusters | None, *, group_size: int) -> None:
        self._group_size = group_size
        self._fused = wants_kernels(x.device)
        if self._fused:
            refusal = kernel_refusal(x, clusters, group_size=group_size)
            if refusal is not None:
                say_once(f"quantize_two_level runs in PyTorch steps: {refusal}")
                self._fused = False
        self._x, self._clusters = x.detach(), clusters
        if self._fused:
            self._spans = _kernel().spans(self._x, clusters, group_size=group_size)
        else:
            self._x = _residual(self._x, clusters)
            self._spans = reference.spans(self._x, group_size=group_size)

    @property
    def widest(self) -> Tensor:
        """Widest range of a group of any head, float32 scalar; NaN or inf where x is not finite."""
        return self._spans.amax()

    def encode(self) -> TwoLevelCodes:
        """The codes."""
        if self._fused:
            codes: TwoLevelCodes = _kernel().encode(
                self._x, self._clusters, self._spans, group_size=self._group_size
            )
            return codes
        return reference.encode(self._x, self._spans, group_size=self._group_size)


def kernel_refusal(x: Tensor, clusters: Clusters | None, *, group_size: int) -> str | None:
    """Why the Triton kernels do not serve this, or None. Their first use is checked here."""
    size = x.shape[3]
    groups = size // group_size
    if group_size & (group_size - 1) or groups & (groups - 1) or not 16 <= size <= 256:
        return f"{groups} groups of {group_size} channels; both have to be powers of two"
    if x.shape[0] * x.shape[1] > 65535:
        return f"{x.shape[0]} x {x.shape[1]} heads are more than 65535"
    refusal = machine_refusal(x.device)
    if refusal is not None:
        return refusal
    config = (size, group_size, x.dtype, clusters is not None)
    return checked_refusal(
        "quantize_two_level", config, x.device, lambda: _self_check(x, clusters, group_size)
    )


def _self_check(x: Tensor, clusters: Clusters | None, group_size: int) -> str | None:
    """The same bits as the reference, on a corner."""
    corner = x.detach()[:2, :2, :301]
    if not bool(corner.isfinite().all()):
        raise CannotCheck("inputs are not finite, which checks no kernel")
    if clusters is not None:
        clusters = Clusters(clusters.ids[:2, :2, :301], clusters.table[:2, :2])
    spans = _kernel().spans(corner, clusters, group_size=group_size)
    got = _kernel().encode(corner, clusters, spans, group_size=group_size)
    residual = _residual(corner, clusters)
    want_spans = reference.spans(residual, group_size=group_size)
    want = reference.encode(residual, want_spans, group_size=group_size)
    pairs = [(spans, want_spans), (got.packed, want.packed), (got.zeros, want.zeros)]
    pairs += [(got.steps, want.steps), (got.scale, want.scale)]
    if all(torch.equal(a, b) for a, b in pairs):
        return None
    return "self-check failed: other bits than the reference"


def _residual(x: Tensor, clusters: Clusters | None) -> Tensor:
    """Float32."""
    if clusters is None:
        return x.float()
    centroids = clusters.gather()
    return torch.sub(x.float(), centroids, out=centroids)


def _kernel() -> Any:
    from videokv.kernels.quantize_two_level import triton

    return triton
