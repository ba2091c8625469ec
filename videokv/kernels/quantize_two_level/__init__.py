"""2-bit codes around an integer zero point, with one FP16 scale a head and one byte a group.

    Delta = c s,   c = clamp(rint((max - min) / 3 / s), 1, 255),   s = max over groups / 3 / 255
    zero = clamp(rint(-min / Delta), 0, 3),   code = clamp(rint(x / Delta) + zero, 0, 3)

with 0 inside [min, max] (2609.26425). Centroids can be subtracted first, and what the codes lack
in some directions coded at once (PSAC). On a GPU two kernels: one finds the widest range of each
head, one encodes; both read the tokens in their own dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from videokv.kernels.assign_centroids.layout import Clusters
from videokv.kernels.code_repair import MAX_RANK, RepairCodes
from videokv.kernels.code_repair import reference as repairing
from videokv.kernels.gpu import (
    CannotCheck,
    checked_refusal,
    machine_refusal,
    say_once,
    wants_kernels,
)
from videokv.kernels.quantize_two_level import reference
from videokv.kernels.quantize_two_level.layout import BITS, TOP, TwoLevelCodes, head_scale
from videokv.kernels.subspace_iteration.layout import Directions

__all__ = [
    "BITS",
    "TOP",
    "Encoded",
    "TwoLevelCodes",
    "head_scale",
    "kernel_refusal",
    "quantize_two_level",
]


class Encoded(NamedTuple):
    """codes: None where ``widest`` is beyond what was allowed. widest: range of a group of any
    head; infinite or NaN where the tokens are not finite. repair: None without directions."""

    codes: TwoLevelCodes | None
    widest: float
    repair: RepairCodes | None


def quantize_two_level(
    x: Tensor,
    clusters: Clusters | None,
    *,
    group_size: int,
    most: float,
    directions: Directions | None = None,
) -> Encoded:
    """Codes of ``x`` ``[B, H, T, D]`` less the centroids of ``clusters``, where no group spans more
    than ``most``.

    directions: those in which what the codes lack is kept in 8 bits too (``code_repair``), at most
    ``MAX_RANK``. Synchronises once.
    """
    x = x.detach()
    if wants_kernels(x.device):
        refusal = kernel_refusal(x, clusters, group_size=group_size, directions=directions)
        if refusal is None:
            return _by_kernel(x, clusters, group_size, most, directions)
        say_once(f"quantize_two_level runs in PyTorch steps: {refusal}")
    residual = _residual(x, clusters)
    spans = reference.spans(residual, group_size=group_size)
    widest = float(spans.amax())
    if not widest <= most:
        return Encoded(None, widest, None)
    codes = reference.encode(residual, spans, group_size=group_size)
    if directions is None:
        return Encoded(codes, widest, None)
    error = reference.error(residual, codes, group_size=group_size)
    repair, scales, kept = repairing.code_repair(error, directions)
    return Encoded(codes, widest, RepairCodes(repair, scales, kept.flatten().tolist()))


def _by_kernel(
    x: Tensor,
    clusters: Clusters | None,
    group_size: int,
    most: float,
    directions: Directions | None,
) -> Encoded:
    codes, repair, facts = _kernel().encode(
        x, clusters, group_size=group_size, directions=directions
    )
    widest, kept = _kernel().read_facts(facts)
    if not widest <= most:
        return Encoded(None, widest, None)
    found = None if repair is None else RepairCodes(repair[0], repair[1], kept)
    return Encoded(codes, widest, found)


def kernel_refusal(
    x: Tensor, clusters: Clusters | None, *, group_size: int, directions: Directions | None = None
) -> str | None:
    """Why the Triton kernels do not serve this, or None. Their first use is checked here."""
    size = x.shape[3]
    groups = size // group_size
    if group_size & (group_size - 1) or groups & (groups - 1) or not 16 <= size <= 256:
        return f"{groups} groups of {group_size} channels; both have to be powers of two"
    if x.shape[0] * x.shape[1] > 65535:
        return f"{x.shape[0]} x {x.shape[1]} heads are more than 65535"
    rank = 0 if directions is None else directions.basis.shape[3]
    if rank > MAX_RANK:
        return f"{rank} directions are more than {MAX_RANK}"
    refusal = machine_refusal(x.device)
    if refusal is not None:
        return refusal
    config = (size, group_size, x.dtype, clusters is not None, rank)
    return checked_refusal(
        "quantize_two_level",
        config,
        x.device,
        lambda: _self_check(x, clusters, group_size, directions),
    )


def _self_check(
    x: Tensor, clusters: Clusters | None, group_size: int, directions: Directions | None = None
) -> str | None:
    """The same bits as the reference, on a corner; of repairs nearly all."""
    corner = x.detach()[:2, :2, :301]
    if not bool(corner.isfinite().all()):
        raise CannotCheck("inputs are not finite, which checks no kernel")
    if clusters is not None:
        clusters = Clusters(clusters.ids[:2, :2, :301], clusters.table[:2, :2])
    if directions is not None:
        directions = Directions(*(operand[:2, :2] for operand in directions))
    got, repair, facts = _kernel().encode(
        corner, clusters, group_size=group_size, directions=directions
    )
    widest, kept = _kernel().read_facts(facts)
    residual = _residual(corner, clusters)
    spans = reference.spans(residual, group_size=group_size)
    want = reference.encode(residual, spans, group_size=group_size)
    pairs = [(got.packed, want.packed), (got.zeros, want.zeros)]
    pairs += [(got.steps, want.steps), (got.scale, want.scale)]
    if widest != float(spans.amax()) or not all(torch.equal(a, b) for a, b in pairs):
        return "self-check failed: other bits than the reference"
    if repair is None or directions is None:
        return None
    error = reference.error(residual, want, group_size=group_size)
    codes, scales, _ = repairing.code_repair(error, directions)
    if not bool(codes.any()):
        raise CannotCheck("codes that lack nothing check no repair")
    if kept != (repair[1] > 0).sum((2, 3)).flatten().tolist():
        return "self-check failed: kept rows are counted wrong"
    both = (repair[1] > 0) & (scales > 0)
    unlike = ((repair[0] - codes).abs() * both > 1).float().mean()
    unlike += ((repair[1] > 0) != (scales > 0)).float().mean()
    off = ((repair[1].float() - scales.float()).abs() * both).sum() / scales.float().sum()
    if float(unlike) <= 0.02 and float(off) <= 1e-3:
        return None
    return f"self-check failed: {float(unlike):.1%} of the repairs, scales by {float(off):.1e}"


def _residual(x: Tensor, clusters: Clusters | None) -> Tensor:
    """Float32."""
    if clusters is None:
        return x.float()
    centroids = clusters.gather()
    return torch.sub(x.float(), centroids, out=centroids)


def _kernel() -> Any:
    from videokv.kernels.quantize_two_level import triton

    return triton
