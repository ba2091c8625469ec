"""Batched k-means of the tokens of a chunk: every (batch row, head) is clustered by itself.

Deterministic: the same input gives the same labels and centroids on any number of threads and on
every run, and a row of a batch never sees another row. The number of iterations is fixed, so
nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from videokv.kernels.assign_centroids import choice, few, reference, starts
from videokv.kernels.assign_centroids.choice import channel_weights
from videokv.kernels.assign_centroids.layout import Clusters, gather_centroids
from videokv.kernels.assign_centroids.starts import draw_tokens, label_means
from videokv.kernels.gpu import (
    CannotCheck,
    checked_refusal,
    machine_refusal,
    say_once,
    wants_kernels,
)

__all__ = [
    "MAX_CENTROIDS",
    "Clusters",
    "channel_weights",
    "choose_by_range",
    "cluster",
    "draw_tokens",
    "few_centres",
    "gather_centroids",
    "label_means",
    "nearest",
    "nearest_labels",
    "spread_tokens",
]

MAX_CENTROIDS = 256  # labels are stored in one byte
FEW_BITS = (2, 3, 4)  # of labels among centroids that one block of a program holds
_TOKENS = 1500  # that a check looks at: several blocks of a program, the last not full


def cluster(
    x: Tensor, start: Tensor, *, iterations: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Lloyd's k-means from the given centroids.

    x: ``[B, H, T, D]`` finite, any floating dtype; start: ``[B, H, K, D]``, K <= 256.
    Returns labels uint8 ``[B, H, T]`` and centroids ``[B, H, K, D]``, found in float32 and given in
    ``dtype``. The labels are those that the last centroids are the means of, so the residuals of a
    cluster sum to zero. A cluster without tokens keeps its centroid.
    """
    _check(x, start)
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if wants_kernels(x.device):
        refusal = kernel_refusal(x)
        if refusal is None:
            return _by_kernel(x.detach(), start, iterations=iterations, dtype=dtype)
        say_once(f"k-means runs in PyTorch steps: {refusal}")
    labels, table = reference.cluster(x.float(), start.float(), iterations=iterations)
    return labels, table.to(dtype)


def _by_kernel(
    x: Tensor, start: Tensor, *, iterations: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if step_refusal(x, start) is None:
        found: tuple[Tensor, Tensor] = _step_kernel().cluster(
            x, start, iterations=iterations, dtype=dtype
        )
        return found
    kernel = _kernel()
    # Float32 tokens lose what lies below 2^-11 of their distance from the origin; others nothing.
    near = x if x.dtype == torch.float32 else start
    origin = near.mean(2, keepdim=True, dtype=torch.float32)
    centroids = start - origin
    for _ in range(iterations):
        labels = kernel.nearest_one(x, origin, centroids)
        centroids = kernel.means(x, origin, labels, centroids)
    return labels, (centroids + origin).to(dtype)


def spread_tokens(x: Tensor, *, count: int, seed: int) -> Tensor:
    """k-means++: see ``starts.spread_tokens``. x: ``[B, H, T, D]`` finite; count: 1..256.

    Returns float32 ``[B, H, count, D]``. On a GPU one kernel makes all draws of a head: the same
    but where one comes within rounding of the border between two tokens.
    """
    if not 1 <= count <= MAX_CENTROIDS:
        raise ValueError(f"count must be 1..{MAX_CENTROIDS}, got {count}")
    if wants_kernels(x.device):
        refusal = spread_refusal(x, count=count)
        if refusal is None:
            found: Tensor = _spread_kernel().spread(x.detach(), count=count, seed=seed)
            return found
        say_once(f"k-means++ runs in PyTorch steps: {refusal}")
    return starts.spread_tokens(x, count=count, seed=seed)


def spread_refusal(x: Tensor, *, count: int) -> str | None:
    """Why the kernel of many starts does not serve ``x``, or None. Checked at its first use, with
    tokens of its own: those that come may be not finite."""
    size, refusal = x.shape[3], _unfit(x)
    if refusal is not None:
        return refusal
    config = (size, x.dtype, count)
    return checked_refusal(
        "spread_tokens",
        config,
        x.device,
        lambda: _spread_self_check(x.device, x.dtype, size, count),
    )


def _unfit(x: Tensor) -> str | None:
    """Why no kernel takes these heads here, or None."""
    size = x.shape[3]
    if size > 256 or x.shape[0] * x.shape[1] > 65535:
        return f"heads of {size} channels, {x.shape[0]} x {x.shape[1]} of them"
    return machine_refusal(x.device)


def _spread_self_check(
    device: torch.device, dtype: torch.dtype, size: int, count: int
) -> str | None:
    """The rows are tokens, each drawn as float64 would after those before it."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(1, 2, starts.TOKENS_PER_CENTROID * count + 77, size, generator=generator)
    x += 2 * torch.randn(1, 2, 1, size, generator=generator)
    x = x.to(device, dtype)
    off = starts.draw_error(x, _spread_kernel().spread(x, count=count, seed=1), seed=1)
    return None if off <= 1e-5 else f"self-check failed: draws are off by {off:.1e}"


def few_centres(
    x: Tensor, *, bits: int, iterations: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """k-means with ``2^bits - 1`` centroids beside one that stays at zero, as it is stored.

    x: ``[B, H, T, D]`` finite; bits: of a label, 2 to 4. Returns packed labels uint8
    ``[B, H, bytes]``, the table E4M3 ``[B, H, K, D]`` of labels 1..K (0 is zero) and its scale
    float32 ``[B, H, 1, 1]``. It starts with k-means++. A cluster without tokens keeps its centroid;
    labels are the nearest rows of the stored table.
    """
    if bits not in FEW_BITS or iterations < 1:
        raise ValueError(
            f"bits must be one of {FEW_BITS} and iterations at least 1, got {bits}, {iterations}"
        )
    if wants_kernels(x.device):
        refusal = few_refusal(x, bits=bits)
        if refusal is None:
            return few.by_kernel(x, bits=bits, iterations=iterations, seed=seed)
        say_once(f"k-means of few centroids runs in PyTorch steps: {refusal}")
    start = spread_tokens(x, count=(1 << bits) - 1, seed=seed)
    return few.in_steps(x, start, bits=bits, iterations=iterations)


def few_refusal(x: Tensor, *, bits: int) -> str | None:
    """Why the kernels of few centroids do not serve ``x``, or None. Checked at their first use,
    with tokens of their own: those that come may be not finite."""
    size, refusal = x.shape[3], _unfit(x)
    if refusal is not None:
        return refusal
    config = (size, x.dtype, bits)
    return checked_refusal(
        "few_centres", config, x.device, lambda: few.self_check(size, x.dtype, x.device, bits)
    )


def nearest_labels(x: Tensor, table: Tensor) -> Tensor:
    """The nearest row of ``table`` ``[B, H, K, D]`` of each token, uint8 ``[B, H, T]``; ties to the
    lower label."""
    _check(x, table)
    if wants_kernels(x.device) and kernel_refusal(x) is None:
        origin = table[:, :, 1:].mean(2, keepdim=True) if table.shape[2] > 1 else table
        labels: Tensor = _kernel().nearest_one(x.detach(), origin, table - origin)
        return labels
    return nearest(x, table)[..., 0].to(torch.uint8)


def choose_by_range(
    x: Tensor, table: Tensor, moment: Tensor, *, group_size: int, candidates: int
) -> Tensor | None:
    """Of the centroids nearest in a diagonal metric, the one with the smallest weighted range of
    the residual: QSAC's two steps in one kernel. None where PyTorch has to do it.

    x ``[B, H, T, D]``; table ``[B, H, K, D]``; moment ``[B, H, D, D]``, its diagonal the metric.
    Labels uint8.
    """
    _check(x, table)
    if not wants_kernels(x.device):
        return None
    refusal = kernel_refusal(x) or choice.refusal(
        x, table, moment, group_size=group_size, candidates=candidates
    )
    if refusal is not None:
        say_once(f"QSAC's choice runs in PyTorch steps: {refusal}")
        return None
    found: Tensor = _kernel().choose_by_range(
        x.detach(), table, moment, group_size=group_size, candidates=candidates
    )
    return found


def kernel_refusal(x: Tensor) -> str | None:
    """Why the k-means kernels do not serve ``x``, or None. Their first use is checked here."""
    size, refusal = x.shape[3], _unfit(x)
    if refusal is not None:
        return refusal
    return checked_refusal("assign_centroids", (size, x.dtype), x.device, lambda: _self_check(x))


def step_refusal(x: Tensor, start: Tensor) -> str | None:
    """Why an iteration reads the tokens twice, or None. The first use of one pass is checked."""
    kernel, centroids = _step_kernel(), start.shape[2]
    refusal: str | None = kernel.refusal(x, centroids=centroids)
    if refusal is not None:
        return refusal
    config = (x.shape[3], x.dtype, (centroids - 1).bit_length())
    return checked_refusal("kmeans_step", config, x.device, lambda: _step_self_check(x, start))


def _step_self_check(x: Tensor, start: Tensor) -> str | None:
    """One iteration: how much farther its choices are than the nearest, and means of its labels."""
    tokens, table = _corner(x), start.detach()[:2, :2]
    labels, means = _step_kernel().cluster(tokens, table, iterations=1)
    tokens, table = tokens.float(), table.float()
    best = reference.nearest(
        tokens - table.mean(2, keepdim=True), table - table.mean(2, keepdim=True), count=1
    )
    far, near = ((tokens - gather_centroids(table, ids)).norm() for ids in (labels, best[..., 0]))
    spread = (tokens - tokens.mean(2, keepdim=True)).norm()
    off = float((means - reference.means(tokens, labels.long(), table)).norm() / tokens.norm())
    if float(far) <= 1.001 * float(near) + 1e-3 * float(spread) and off <= 1e-3:
        return None
    return f"self-check failed: distances {float(far):.4g} for {float(near):.4g}, means {off:.1e}"


def _corner(x: Tensor) -> Tensor:
    """Tokens of the first heads, over again where there are few."""
    tokens = x.detach()[:2, :2, torch.arange(_TOKENS, device=x.device) % x.shape[2]]
    spread = float((tokens.float() - tokens.mean(2, keepdim=True, dtype=torch.float32)).norm())
    if not 0 < spread < float("inf"):
        raise CannotCheck("tokens that are all alike or not finite check no kernel")
    return tokens


def _self_check(x: Tensor) -> str | None:
    """Means for given labels, and how much farther the kernel's choices are than the nearest."""
    tokens = _corner(x)
    origin = tokens.mean(2, keepdim=True, dtype=torch.float32)
    moved = tokens.float() - origin
    table = moved[:, :, :: max(1, moved.shape[2] // 37)][:, :, :MAX_CENTROIDS].contiguous()
    labels = _kernel().nearest_one(tokens, origin, table)
    best = reference.nearest(moved, table, count=1)[..., 0]
    far, near = ((moved - gather_centroids(table, ids)).norm() for ids in (labels, best))
    got = _kernel().means(tokens, origin, best.to(torch.uint8), table)
    off = (got - reference.means(moved, best, table)).norm() / moved.norm()
    if float(far) <= 1.001 * float(near) + 1e-3 * float(moved.norm()) and float(off) <= 1e-3:
        return None
    return f"self-check failed: distances {float(far):.4g} for {float(near):.4g}, means {off:.1e}"


def _kernel() -> Any:
    from videokv.kernels.assign_centroids import triton

    return triton


def _step_kernel() -> Any:
    from videokv.kernels.assign_centroids import triton_step

    return triton_step


def _spread_kernel() -> Any:
    from videokv.kernels.assign_centroids import triton_spread

    return triton_spread


def nearest(x: Tensor, centroids: Tensor, *, count: int = 1) -> Tensor:
    """The ``count`` nearest centroids of each token, nearest first, ties to the lower label.

    x: ``[B, H, T, D]``; centroids: ``[B, H, K, D]``. Returns int64 ``[B, H, T, count]``.
    """
    _check(x, centroids)
    if not 1 <= count <= centroids.shape[2]:
        raise ValueError(f"count must be 1..{centroids.shape[2]} (centroids), got {count}")
    return reference.nearest(x.float(), centroids.float(), count=count)


def _check(x: Tensor, centroids: Tensor) -> None:
    if x.ndim != 4 or centroids.ndim != 4 or x.shape[2] < 1:
        raise ValueError(
            "expected tokens [B, H, T, D] with T >= 1 and centroids [B, H, K, D], "
            f"got {tuple(x.shape)} and {tuple(centroids.shape)}"
        )
    if x.shape[:2] != centroids.shape[:2] or x.shape[3] != centroids.shape[3]:
        raise ValueError(
            "tokens and centroids must agree in batch, heads and head size, "
            f"got {tuple(x.shape)} and {tuple(centroids.shape)}"
        )
    if not 1 <= centroids.shape[2] <= MAX_CENTROIDS:
        raise ValueError(
            f"centroids must be 1..{MAX_CENTROIDS} (labels are one byte), got {centroids.shape[2]}"
        )
    if not (torch.is_floating_point(x) and torch.is_floating_point(centroids)):
        raise ValueError(f"expected floating tensors, got {x.dtype} and {centroids.dtype}")
