"""QuantWM's quantizer: clusters chosen for what the queries see (QSAC), two-level steps.

Query-sensitivity-aware clustering (2609.26425, Eq. 6-12): k-means as in Quant VideoGen, then each
key takes, among the few centroids that are nearest in the queries' metric, the one whose residual
has the smallest range where queries are large. Then 2-bit codes around an integer zero point, with
one FP16 scale a head and one byte a group:

    Delta = c s2,   x^ = mu[z] + Delta (q - zero),   q, zero in 0..3
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from videokv.kernels.assign_centroids import (
    Clusters,
    channel_weights,
    choose_by_range,
    gather_centroids,
    nearest,
)
from videokv.kernels.code_repair import RepairCodes
from videokv.kernels.pack_codes import unpack
from videokv.kernels.quantize_two_level import BITS, TOP, quantize_two_level
from videokv.kernels.reconstruct import Parts, fused
from videokv.kernels.subspace_iteration import Directions
from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import EncodeContext, Quantizer
from videokv.quantizers import register
from videokv.quantizers.centroid_residual import (
    CentroidChunk,
    Clustering,
    Start,
    previous_clusters,
)
from videokv.quantizers.inputs import check_count, checked
from videokv.quantizers.subspace import Subspace, check_moment
from videokv.tensors import GroupFormat, require_finite

LARGEST_RANGE = 65504.0 * 255 * TOP  # beyond it the FP16 scale of a head would overflow
BLOCK_ELEMENTS = 1 << 24  # float32 elements of residuals tried at once (64 MiB)

Metric = Literal["diagonal", "full", "full-candidates", "none"]
METRICS = ("diagonal", "full", "full-candidates", "none")


@dataclass(frozen=True, eq=False)
class TwoLevelChunk:
    """2-bit codes ``[B, H, T, D]`` in groups along the channels.

    packed: uint8 ``[B, H, bytes]``, the codes of all tokens in a row; zeros likewise, one a group.
    steps: uint8 ``[B, H, T, G]``, 0 where a group is all zero; scale: float16 ``[B, H, 1, 1]``.
    """

    packed: Tensor
    zeros: Tensor
    steps: Tensor
    scale: Tensor
    group_size: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, D) of the tensor that was encoded."""
        batch, heads, tokens, groups = self.steps.shape
        return batch, heads, tokens, groups * self.group_size

    def real_steps(self) -> Tensor:
        """Delta in float32 ``[B, H, T, G]``."""
        return self.steps.float() * self.scale.float()

    def parts(self) -> Parts:
        """Itself, as the reconstruction kernel sees it."""
        return Parts(
            codes=self.packed,
            bits=BITS,
            tokens=self.steps.shape[2],
            head_dim=self.shape[3],
            group_size=self.group_size,
            steps=self.steps,
            scale=self.scale,
            zero="packed",
            zeros=self.zeros,
        )

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Reconstruct ``[B, H, T, D]``; the arithmetic is float32."""
        done = fused(self, dtype)
        if done is not None:
            return done
        batch, heads, tokens, size = self.shape
        groups = self.steps.shape[3]
        codes = unpack(self.packed, bits=BITS, count=tokens * size).float()
        zeros = unpack(self.zeros, bits=BITS, count=tokens * groups).float()
        codes = codes.view(batch, heads, tokens, groups, self.group_size)
        steps = self.real_steps().unsqueeze(-1)
        codes.sub_(zeros.view_as(steps)).mul_(steps)
        return codes.view(batch, heads, tokens, size).to(dtype)

    def noise(self) -> tuple[ScoreNoise, ...]:
        """Delta^2, one feature a group."""
        return (ScoreNoise(self.real_steps().square(), QueryMap(self.group_size)),)


def encode_two_level(
    x: Tensor,
    *,
    group_size: int,
    context: EncodeContext,
    clusters: Clusters | None = None,
    directions: Directions | None = None,
) -> tuple[TwoLevelChunk, RepairCodes | None]:
    """Pack ``[B, H, T, D]`` less the centroids of ``clusters``; with directions code what the codes
    lack there. Synchronises once.

    Raises ValueError naming the layer where it is not finite or a group's range is beyond 5e7,
    which the FP16 scale cannot hold.
    """
    codes, widest, repair = quantize_two_level(
        x, clusters, group_size=group_size, most=LARGEST_RANGE, directions=directions
    )
    if codes is None:
        require_finite(x, what=f"{context.role}s", layer=context.layer)
        raise ValueError(
            f"{context.role}s of layer {context.layer} span {widest:.3g} within a group after "
            f"their centroids are taken off; two-level steps hold {LARGEST_RANGE:.1e}: check the "
            "model's inputs, or use the qvg family"
        )
    chunk = TwoLevelChunk(codes.packed, codes.zeros, codes.steps, codes.scale, group_size)
    return chunk, repair


@dataclass(frozen=True)
class QueryAware:
    """QuantWM's quantizer without its compensation (``Subspace`` adds that).

    group_size: channels that share a step.
    candidates: how many centroids are tried for each token.
    metric: what the queries make of errors. ``diagonal`` of M = mean of q q^T, for the candidates'
        distance (Eq. 9) and their score (Eq. 12): the published default. ``full-candidates``: the
        whole matrix for the distance alone, the published ablation (App. C.4). ``full``: for the
        score too (ours). Eq. 12 takes errors of different channels as unrelated, so that only M's
        diagonal is left in it; here each candidate's residual is rounded and its own error e
        decides, by e^T M e. ``none``: labels stay those of k-means (values). Before the first
        queries are known, labels stay too.
    clustering: k-means options.
    """

    group_size: int = 64
    candidates: int = 4
    metric: Metric = "diagonal"
    clustering: Clustering = Clustering()
    stackable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("candidates", self.candidates)
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {METRICS}, got {self.metric!r}")
        _ = GroupFormat(BITS, self.group_size)

    @property
    def reads_queries(self) -> bool:
        """Whether past queries choose centroids."""
        return self.metric != "none"

    @property
    def period(self) -> int:
        """Chunks after which what they share begins anew."""
        return self.clustering.span_chunks

    def check(self, head_dim: int) -> None:
        """Raise ValueError where groups do not divide the head."""
        GroupFormat(BITS, self.group_size).check_head_dim(head_dim)

    def encode(self, x: Tensor, context: EncodeContext) -> CentroidChunk:
        """Cluster ``[B, H, T, D]``, choose centroids for the queries, quantize the residual."""
        return self._encode(x, context, None)[0]

    def encode_repaired(
        self, x: Tensor, context: EncodeContext, directions: Directions
    ) -> tuple[CentroidChunk, RepairCodes]:
        """``encode``, and what the chunk lacks in at most ``code_repair.MAX_RANK`` directions,
        found while it is packed: nothing is decoded, and the host waits once for both."""
        chunk, repair = self._encode(x, context, directions)
        assert repair is not None
        return chunk, repair

    def _encode(
        self, x: Tensor, context: EncodeContext, directions: Directions | None
    ) -> tuple[CentroidChunk, RepairCodes | None]:
        x = checked(x)
        self.check(x.shape[-1])
        before = previous_clusters(context)
        previous = before[0] if before else None
        place = self.clustering.place(x, context.previous, stages=1)
        clusters = self.clustering.fit(x, seed=context.seed, previous=previous, place=place)
        if self.metric != "none" and context.query_moment is not None:
            clusters = self._reassigned(x, clusters, context.query_moment)
        packed, repair = encode_two_level(
            x,
            group_size=self.group_size,
            context=context,
            clusters=clusters,
            directions=directions,
        )
        return CentroidChunk((clusters,), packed, place), repair

    def _reassigned(self, x: Tensor, clusters: Clusters, moment: Tensor) -> Clusters:
        """The same centroids, labels by the smallest score among the nearest in the metric."""
        check_moment(moment, x)
        count = min(self.candidates, clusters.table.shape[2])
        if self.metric == "diagonal":
            chosen = choose_by_range(
                x, clusters.table, moment, group_size=self.group_size, candidates=count
            )
            if chosen is not None:
                return Clusters(chosen, clusters.table)
        weights = channel_weights(moment)
        x = x.float()
        lens = weights.sqrt().diag_embed() if self.metric == "diagonal" else _root(moment)
        score: Callable[[Tensor], Tensor]
        if self.metric == "full":
            score = functools.partial(_seen_error, lens=lens, group_size=self.group_size)
        else:
            score = functools.partial(_weighted_range, weights=weights, group_size=self.group_size)
        table = clusters.table.float()
        seen_table = table @ lens
        labels = []
        for part in x.split(max(1, BLOCK_ELEMENTS // x[:, :, 0].numel()), dim=2):
            near = nearest(part @ lens, seen_table, count=count)
            labels.append(_smallest(score, part, table, near))
        return Clusters(torch.cat(labels, 2).to(torch.uint8), clusters.table)


def _smallest(score: Callable[[Tensor], Tensor], x: Tensor, table: Tensor, near: Tensor) -> Tensor:
    """Of the candidates ``[B, H, T, M]``, the label whose residual has the smallest score."""
    near = near.sort(-1).values  # ties go to the lower label
    scores = [score(x - gather_centroids(table, label)) for label in near.unbind(-1)]
    best = torch.stack(scores, -1).argmin(-1, keepdim=True)
    return near.gather(-1, best)[..., 0]


def _weighted_range(residual: Tensor, *, weights: Tensor, group_size: int) -> Tensor:
    """Eq. 12 of residuals ``[B, H, T, D]``: squared ranges of the groups, weighted."""
    groups = residual.unflatten(-1, (-1, group_size))
    spread = groups.amax(-1) - groups.amin(-1)  # [B, H, T, G]
    group_weights = weights.unflatten(-1, (-1, group_size)).sum(-1)  # [B, H, G]
    return (spread.square() * group_weights[:, :, None]).sum(-1)


def _seen_error(residual: Tensor, *, lens: Tensor, group_size: int) -> Tensor:
    """e^T M e / mean(diag M) of the errors e that rounding residuals ``[B, H, T, D]`` would make.

    lens: ``_root(M)``. Steps are those before the two-level rounding: the scale of a head is known
    only once every token has its label, and moves a step by at most half a 255th of the largest.
    """
    groups = residual.unflatten(-1, (-1, group_size))
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    step = (groups.amax(-1, keepdim=True).clamp(min=0) - low) / TOP
    divisor = torch.where(step > 0, step, torch.inf)
    zero = (-low / divisor).round_().clamp_(0, TOP)
    codes = (groups / divisor).round_().add_(zero).clamp_(0, TOP)
    error = (groups - codes.sub_(zero).mul_(step)).flatten(-2)
    return (error @ lens).square().sum(-1)


def _root(moment: Tensor) -> Tensor:
    """R ``[B, H, D, D]`` with R R^T = M / mean(diag M): distances after it are the full metric."""
    values, vectors = torch.linalg.eigh(moment.double())
    scale = moment.double().diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    values = values.clamp(min=0) / torch.where(scale > 0, scale, 1.0)
    return (vectors * values.sqrt()[..., None, :]).float()


@register("quantwm", bits=(BITS,), summary="query-aware clusters, principal-subspace repair")
def build_quantwm(
    bits: int,
    *,
    group_size: int = 64,
    rank: int = 8,
    candidates: int = 4,
    metric: Metric = "diagonal",
    centroids: int | None = None,
    iterations: int = 2,
    start: Start = "previous_centroids",
    span_chunks: int = 1,
    basis_chunks: int = 1,
) -> tuple[Quantizer, Quantizer]:
    """Keys: QSAC and PSAC of ``rank`` (0: without); values: plain k-means, the same codes.

    span_chunks: chunks that share a codebook (``Clustering``), of keys and of values. basis_chunks:
    chunks that share PSAC's basis (``Subspace``).
    """
    if bits != BITS:
        raise ValueError(f"quantwm has {BITS}-bit codes only, got bits={bits!r}")
    check_count("rank", rank, least=0)
    if not rank and basis_chunks != 1:
        raise ValueError(f"rank 0 has no basis to share; leave out basis_chunks={basis_chunks!r}")
    clustering = Clustering(centroids, iterations, start, span_chunks)
    keys = QueryAware(group_size, candidates, metric, clustering)
    values = QueryAware(group_size, 1, "none", clustering)
    return (Subspace(keys, rank, basis_chunks) if rank else keys), values
