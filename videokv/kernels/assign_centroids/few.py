"""Few centroids beside zero: the PyTorch steps, the way to the kernels, and their check."""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.kernels.assign_centroids.layout import gather_centroids
from videokv.kernels.assign_centroids.reference import nearest
from videokv.kernels.assign_centroids.starts import label_means, spread_tokens
from videokv.kernels.pack_codes import pack, unpack
from videokv.tensors import E4M3, E4M3_MAX

_TOKENS = 2100  # that a check looks at: several blocks of a program, the last not full


def in_steps(
    x: Tensor, start: Tensor, *, bits: int, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``few_centres``; start: ``[B, H, K, D]``."""
    table = _with_zero(start.float())
    for _ in range(iterations):
        labels = nearest(x.float(), table, count=1)[..., 0].to(torch.uint8)
        table = _with_zero(label_means(x, labels, fallback=table)[:, :, 1:])
    table = table[:, :, 1:]
    largest = table.abs().amax((2, 3), keepdim=True)
    scale = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    stored = (table / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    labels = nearest(x.float(), _with_zero(stored.float() * scale), count=1)[..., 0]
    return pack(labels.to(torch.uint8), bits=bits), stored, scale


def by_kernel(x: Tensor, *, bits: int, iterations: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """See ``few_centres``; on a GPU."""
    from videokv.kernels.assign_centroids import triton_few

    x = x.detach()
    x = x if x.stride(-1) == 1 else x.contiguous()
    start = triton_few.spread(x, count=(1 << bits) - 1, seed=seed)
    return triton_few.few_centres(x, start, iterations=iterations, bits=bits)


def self_check(size: int, dtype: torch.dtype, device: torch.device, bits: int) -> str | None:
    """Starts are tokens, far apart; from the same starts the clusters are as tight as in steps."""
    from videokv.kernels.assign_centroids import triton_few

    generator = torch.Generator().manual_seed(size)
    x = torch.randn(1, 2, _TOKENS, size, generator=generator)
    x += 2 * torch.randn(1, 2, 4, size, generator=generator).repeat(1, 1, _TOKENS // 4, 1)
    x = (x + torch.randn(size, generator=generator)).to(device, dtype)
    count = (1 << bits) - 1
    starts = [
        triton_few.spread(x, count=count, seed=0),
        spread_tokens(x, count=count, seed=0),
    ]
    apart = (starts[0][:, :, :, None] - x.float()[:, :, None]).square().sum(-1).amin(-1)
    if bool((apart != 0).any()):
        return "self-check failed: k-means starts from what is no token"
    far = [float(_residual(x, start, None).norm()) for start in starts]
    if not far[0] <= 1.25 * far[1]:
        return f"self-check failed: tokens are {far[0]:.4g} from the starts, not {far[1]:.4g}"
    options = {"bits": bits, "iterations": 2}
    found = [
        triton_few.few_centres(x, starts[1].contiguous(), **options),
        in_steps(x, starts[1], **options),
    ]
    near = []
    for ids, table, scale in found:
        labels = unpack(ids, bits=bits, count=_TOKENS)
        near.append(float(_residual(x, table.float() * scale, labels).norm()))
    if near[0] <= 1.005 * near[1]:
        return None
    return f"self-check failed: tokens are {near[0]:.4g} from their centroids, not {near[1]:.4g}"


def _residual(x: Tensor, table: Tensor, labels: Tensor | None) -> Tensor:
    full = _with_zero(table)
    if labels is None:
        labels = nearest(x.float(), full, count=1)[..., 0]
    return x.float() - gather_centroids(full, labels)


def _with_zero(table: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(table[:, :, :1]), table], 2)
