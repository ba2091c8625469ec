"""The factor of correction ``calibrated``: a root of one convex function per KV head.

In PyTorch the scores of sampled queries with a whole chunk are written and read some forty times;
on a GPU four Triton launches find the root, scores stay in registers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from videokv.kernels.fit_factor import reference
from videokv.kernels.fit_factor.range import FACTOR_RANGE, NEAR, SMALLEST_SLOPE, far_pairs
from videokv.kernels.gpu import checked_refusal, machine_refusal, say_once, wants_kernels

__all__ = [
    "FACTOR_RANGE",
    "NEAR",
    "SMALLEST_SLOPE",
    "far_pairs",
    "fit_factor",
    "kernel_refusal",
]

MAX_HEAD_DIM = 256
MAX_FEATURES = 256
_LARGEST_GRID = 65535  # programs of its third axis
_TOLERANCE = 1e-3  # of the factor


def fit_factor(
    queries: Tensor, true: Tensor, noisy: Tensor, phi: Tensor, weights: Tensor, *, scale: float
) -> Tensor:
    """lambda ``[B, Hkv]``: mean lse_far(s_hat - lambda b) = mean lse_far(s), within [-1, 2].

    queries: ``[B, Hq, M, D]``, M evenly spaced rows of the chunk's T tokens. true, noisy: keys
    ``[B, Hkv, T, D]`` before and after packing. phi: features ``[B, Hq, M, F]`` and weights
    ``[B, Hkv, T, F]`` (any of its sizes may be 1), of b = phi . weights, in float32. scale: of the
    softmax. queries and true share a dtype; noisy has it too, or is float32: rounded to BF16, keys
    of small noise would move lambda by up to 1e-2. By the kernel where ``kernel_refusal`` finds no
    reason against it, else by the reference in float32 at least.
    """
    size, features = true.shape[3], phi.shape[3]
    refusal = kernel_refusal(queries.dtype, size=size, features=features, device=true.device)
    if refusal is None and true.shape[0] * true.shape[1] > _LARGEST_GRID:
        refusal = f"{true.shape[0]} x {true.shape[1]} heads are more than {_LARGEST_GRID}"
    if refusal is None:
        found: Tensor = _kernel().fit_factor(queries, true, noisy, phi, weights, scale=scale)
        return found
    if wants_kernels(true.device):
        say_once(f"factors of 'calibrated' are fitted in PyTorch steps: {refusal}")
    wide = torch.promote_types(queries.dtype, torch.float32)
    queries, true, noisy, phi, weights = (x.to(wide) for x in (queries, true, noisy, phi, weights))
    return reference.fit_factor(queries, true, noisy, phi, weights, scale=scale)


def kernel_refusal(
    dtype: torch.dtype, *, size: int, features: int, device: torch.device
) -> str | None:
    """Why the Triton kernel does not serve queries and keys of ``dtype``, or None; a first use is
    checked here. size: of a head."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"queries and keys are FP16, BF16 or float32, got {dtype}"
    if size > MAX_HEAD_DIM or features > MAX_FEATURES:
        return f"head sizes to {MAX_HEAD_DIM}, features to {MAX_FEATURES}: {size} and {features}"
    refusal = machine_refusal(device)
    if refusal is not None:
        return refusal
    return checked_refusal(
        "fit_factor", (dtype, size, features), device,
        lambda: _self_check(dtype, size, features, device),
    )  # fmt: skip


def _self_check(
    dtype: torch.dtype, size: int, features: int, device: torch.device, *, tokens: int = 1500
) -> str | None:
    """Kernel against the reference in float64, grouped queries, on noise of known size; a program
    takes several blocks of tokens, the last not full."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    queries, true = draw(1, 4, 77, size).to(dtype), draw(1, 2, tokens, size).to(dtype)
    noisy = (true + 0.4 * draw(1, 2, tokens, size)).float()
    scale = size**-0.5
    phi = queries.double().square().mean(-1, keepdim=True).expand(1, 4, 77, features) / features
    weights = 0.1 * (0.5 + draw(1, 2, tokens, features).square())
    got = _kernel().fit_factor(queries, true, noisy, phi.float(), weights.float(), scale=scale)
    want = reference.fit_factor(
        queries.double(), true.double(), noisy.double(), phi, weights, scale=scale
    )
    off = float((got - want).abs().nan_to_num(torch.inf).max())
    return None if off <= _TOLERANCE else f"self-check failed: factors are off by {off:.1e}"


def _kernel() -> Any:
    from videokv.kernels.fit_factor import triton

    return triton
