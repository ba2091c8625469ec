"""Quant VideoGen: cluster the tokens of a chunk, quantize what the centroids leave over.

    x^ = mu_1[z_1] + ... + mu_S[z_S] + Delta q

Stage s clusters the residual of stage s - 1; only the last residual is quantized (2602.02958,
semantic-aware smoothing and progressive residual quantization). With ``span_chunks`` a codebook
serves several consecutive chunks: the first fits it, the others take labels of it and hold the same
tensor, so that it is paid for once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from videokv.kernels.assign_centroids import (
    MAX_CENTROIDS,
    Clusters,
    cluster,
    draw_tokens,
    label_means,
    nearest_labels,
    spread_tokens,
)
from videokv.kernels.quantize_groups import quantize_packed
from videokv.kernels.reconstruct import Parts, fused, inner_parts
from videokv.noise import ScoreNoise
from videokv.protocols import EncodeContext, Packed, Quantizer
from videokv.quantizers import register
from videokv.quantizers.groupwise import GroupedChunk
from videokv.quantizers.inputs import check_count, check_flag, checked
from videokv.tensors import GroupFormat

Start = Literal["previous_centroids", "previous_labels", "spread", "random"]
STARTS = ("previous_centroids", "previous_labels", "spread", "random")


def default_centroids(tokens: int) -> int:
    """256 from 9,000 tokens on; below, the power of two nearest 256 N / 12150, at least 8.

    So that centroids cost about a third of a bit an element whatever the chunk's length.
    """
    if tokens >= 9000:
        return MAX_CENTROIDS
    ideal = MAX_CENTROIDS * tokens / 12150
    return min((8, 16, 32, 64, 128, 256), key=lambda power: abs(power - ideal))


@dataclass(frozen=True)
class Clustering:
    """Options of the k-means of one stage.

    centroids: 1..256, or None for ``default_centroids`` of the tokens of a whole span, all of its
        chunks taken as long as its first.
    iterations: of Lloyd's algorithm, a fixed number.
    start: ``previous_centroids`` (those of the chunk before), ``previous_labels`` (means of the new
        tokens under the labels of the chunk before, which needs equal lengths), ``spread``
        (k-means++) or ``random`` tokens. The first two fall back to what the chunk before allows:
        labels to centroids where lengths differ, centroids to ``spread`` where there are none of
        the same number.
    span_chunks: how many consecutive chunks a codebook serves; 1: every chunk fits its own.
    """

    centroids: int | None = None
    iterations: int = 2
    start: Start = "previous_centroids"
    span_chunks: int = 1

    def __post_init__(self) -> None:
        count = self.centroids
        whole = isinstance(count, int) and not isinstance(count, bool)
        if count is not None and not (whole and 1 <= count <= MAX_CENTROIDS):
            raise ValueError(
                f"centroids must be 1..{MAX_CENTROIDS} (a label is one byte) or None, "
                f"got {self.centroids!r}"
            )
        check_count("iterations", self.iterations)
        if self.start not in STARTS:
            raise ValueError(f"start must be one of {STARTS}, got {self.start!r}")
        check_count("span_chunks", self.span_chunks)

    def place(self, x: Tensor, previous: Packed | None, *, stages: int) -> int:
        """The place of the chunk ``x`` in its span; at 0 it fits codebooks of its own.

        Also where the chunk before has none that fit: another quantizer's, other heads.
        """
        if not isinstance(previous, CentroidChunk) or len(previous.clusters) != stages:
            return 0
        table = previous.clusters[0].table
        fits = table.shape[:2] == x.shape[:2] and table.shape[3] == x.shape[3]
        if self.centroids is not None:
            fits = fits and table.shape[2] == self.centroids
        return previous.place + 1 if fits and previous.place + 1 < self.span_chunks else 0

    def fit(self, x: Tensor, *, seed: int, previous: Clusters | None, place: int = 0) -> Clusters:
        """Cluster ``[B, H, T, D]``; ``previous`` is the same stage of the chunk before.

        place: of the chunk in its span; after the first, labels of the very table of ``previous``.
        """
        if place and previous is not None:
            return Clusters(nearest_labels(x, previous.table.float()), previous.table)
        start = self._start(x, seed, previous)
        ids, table = cluster(x, start, iterations=self.iterations, dtype=torch.bfloat16)
        return Clusters(ids, table)

    def _start(self, x: Tensor, seed: int, previous: Clusters | None) -> Tensor:
        count = self.centroids or default_centroids(x.shape[2] * self.span_chunks)
        batch, heads, _, size = x.shape
        fits = previous is not None and previous.table.shape == (batch, heads, count, size)
        if self.start == "random":
            return draw_tokens(x, count=count, seed=seed)
        if self.start == "spread" or previous is None or not fits:
            return spread_tokens(x, count=count, seed=seed)
        if self.start == "previous_labels" and previous.ids.shape == x.shape[:3]:
            return label_means(x, previous.ids, fallback=previous.table)
        return previous.table


@dataclass(frozen=True, eq=False)
class CentroidChunk:
    """A packed chunk: the clusters of each stage and the packed last residual.

    place: in its span of chunks. From 1 on, the tables are the tensors of the chunk before; they
    live as long as any chunk of the span.
    """

    clusters: tuple[Clusters, ...]
    residual: Packed
    place: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, D) of the tensor that was encoded."""
        return self.residual.shape

    def parts(self) -> Parts | None:
        """Those of the residual with the centroids, None where they do not go together."""
        inner = inner_parts(self.residual)
        return None if inner is None else inner.with_stages(self.clusters)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Residual plus centroids, added in float32: ``[B, H, T, D]``."""
        done = fused(self, dtype)
        if done is not None:
            return done
        total = self.residual.decode(torch.float32)
        for clusters in self.clusters:
            total.add_(clusters.gather())
        if dtype == torch.float16:
            total.clamp_(-65504.0, 65504.0)  # the error may carry a value past the largest input
        return total.to(dtype)

    def noise(self) -> tuple[ScoreNoise, ...]:
        """That of the residual: centroids are exact and have no step."""
        return self.residual.noise()


@dataclass(frozen=True)
class CentroidResidual:
    """Quantizer of Quant VideoGen.

    bits, group_size: of the residual, in groups along the channels, with E4M3 steps.
    stages: how often the residual is clustered again (1; Pro: 4).
    symmetric: codes around zero (at 2 bits: ternary), halves rounded away from zero, as published.
        False stores each group's minimum as well (+16 / group_size bits, less than half the error
        on Gaussian residuals).
    clustering: k-means options.
    """

    bits: int = 2
    group_size: int = 64
    stages: int = 1
    symmetric: bool = True
    clustering: Clustering = Clustering()
    reads_queries: ClassVar[bool] = False
    stackable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("stages", self.stages)
        check_flag("symmetric", self.symmetric)
        _ = self.format

    @functools.cached_property
    def format(self) -> GroupFormat:
        """Of the last residual."""
        return GroupFormat(self.bits, self.group_size, symmetric=self.symmetric)

    @property
    def period(self) -> int:
        """Chunks after which what they share begins anew."""
        return self.clustering.span_chunks

    def check(self, head_dim: int) -> None:
        """Raise ValueError where groups do not divide the head."""
        self.format.check_head_dim(head_dim)

    def encode(self, x: Tensor, context: EncodeContext) -> CentroidChunk:
        """Cluster ``[B, H, T, D]`` stage by stage, then quantize the residual."""
        x = checked(x)
        self.check(x.shape[-1])
        before = previous_clusters(context)
        place = self.clustering.place(x, context.previous, stages=self.stages)
        found: list[Clusters] = []
        residual = x  # kernels read it in its own dtype
        for stage in range(self.stages):
            previous = before[stage] if stage < len(before) else None
            found.append(
                self.clustering.fit(residual, seed=context.seed, previous=previous, place=place)
            )
            if stage < self.stages - 1:
                centroids = found[-1].gather()
                residual = torch.sub(residual.float(), centroids, out=centroids)
        return CentroidChunk(tuple(found), self._quantize(residual, found[-1], context), place)

    def _quantize(self, x: Tensor, clusters: Clusters, context: EncodeContext) -> GroupedChunk:
        """What the last stage's centroids leave of ``x``."""
        grouped = quantize_packed(
            x,
            format=self.format,
            what=f"{context.role}s",
            layer=context.layer,
            clusters=clusters,
            away=self.symmetric,
        )
        return GroupedChunk(
            packed=grouped.packed,
            steps=grouped.steps,
            zeros=grouped.zeros,
            normaliser=grouped.normaliser,
            format=self.format,
            head_dim=x.shape[-1],
        )


def previous_clusters(context: EncodeContext) -> tuple[Clusters, ...]:
    """The clusters of the chunk before, if it had any."""
    previous = context.previous
    return previous.clusters if isinstance(previous, CentroidChunk) else ()


@register("qvg", bits=(2, 4), summary="k-means centroids and a symmetric residual (Quant VideoGen)")
def build_qvg(
    bits: int,
    *,
    group_size: int = 64,
    stages: int = 1,
    symmetric: bool = True,
    centroids: int | None = None,
    iterations: int = 2,
    start: Start = "previous_centroids",
    span_chunks: int = 1,
) -> tuple[Quantizer, Quantizer]:
    """Keys and values alike; the options are those of ``CentroidResidual`` and ``Clustering``."""
    clustering = Clustering(centroids, iterations, start, span_chunks)
    quantizer = CentroidResidual(bits, group_size, stages, symmetric, clustering)
    return quantizer, quantizer


@register("qvg-pro", bits=(2, 4), summary="Quant VideoGen with four stages and groups of 16")
def build_qvg_pro(
    bits: int,
    *,
    group_size: int = 16,
    stages: int = 4,
    symmetric: bool = True,
    centroids: int | None = None,
    iterations: int = 2,
    start: Start = "previous_centroids",
    span_chunks: int = 1,
) -> tuple[Quantizer, Quantizer]:
    """As ``build_qvg`` with the published Pro settings as defaults."""
    return build_qvg(
        bits,
        group_size=group_size,
        stages=stages,
        symmetric=symmetric,
        centroids=centroids,
        iterations=iterations,
        start=start,
        span_chunks=span_chunks,
    )
