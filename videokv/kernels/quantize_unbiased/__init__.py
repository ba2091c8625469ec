"""Unbiased codes of rotated residuals: rotate, try five grids, pack; on a GPU in one kernel.

    y = H (x - mu[z]),     c = code - (L - 1) / 2,     Delta = y.y / (y.c)

``layout`` says how codes, steps and labels lie in memory, ``reference`` is the PyTorch body.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from videokv.kernels.assign_centroids.layout import gather_centroids
from videokv.kernels.gpu import checked_refusal, machine_refusal, say_once, wants_kernels
from videokv.kernels.pack_codes import pack
from videokv.kernels.quantize_unbiased import reference
from videokv.kernels.quantize_unbiased.layout import (
    LABEL_BITS,
    Centres,
    coded_steps,
    half_range,
    largest_group,
    real_steps,
    with_zero,
)
from videokv.kernels.quantize_unbiased.reference import unbiased_codes
from videokv.rotation import Rotation
from videokv.tensors import E4M3

__all__ = [
    "LABEL_BITS",
    "Centres",
    "UnbiasedCodes",
    "coded_steps",
    "half_range",
    "kernel_refusal",
    "largest_group",
    "quantize_unbiased",
    "real_steps",
    "unbiased_codes",
    "with_zero",
]

_TOKENS = 300  # that a self-check looks at


class UnbiasedCodes(NamedTuple):
    """packed uint8 ``[B, H, T, bytes]``; steps uint8 ``[B, H, T, G]``; scale float32
    ``[B, H, 1, 1]``; largest: largest magnitudes of parts of the input, one of them not finite
    where the input is not."""

    packed: Tensor
    steps: Tensor
    scale: Tensor
    largest: Tensor


def quantize_unbiased(
    x: Tensor, *, bits: int, group_size: int, centres: Centres, rotation: Rotation
) -> UnbiasedCodes:
    """Codes of ``x`` ``[B, H, T, D]`` less its centroids, rotated. Never synchronises, but for the
    first use of a configuration on a GPU: whether ``largest`` is finite is the caller's to ask.

    The kernel's codes are those of the reference but where a number lies half-way between two.
    """
    if wants_kernels(x.device):
        refusal = kernel_refusal(x, bits=bits, group_size=group_size, label_bits=centres.label_bits)
        if refusal is None:
            kernel = _kernel()
            packed, ideal, largest = kernel.quantize(
                x, bits=bits, group_size=group_size, centres=centres, rotation=rotation
            )
            return UnbiasedCodes(packed, *kernel.code_steps(ideal, largest))
        say_once(f"quantize_unbiased runs in PyTorch steps: {refusal}")
    packed, ideal = reference.quantize(
        x, bits=bits, group_size=group_size, centres=centres, rotation=rotation
    )
    return UnbiasedCodes(packed, *coded_steps(ideal), x.abs().amax((2, 3)))


def kernel_refusal(x: Tensor, *, bits: int, group_size: int, label_bits: int) -> str | None:
    """Why the Triton kernels do not serve this, or None. Their first use is checked here, with
    tokens of their own: those that come may be not finite."""
    size = x.shape[3]
    if size > 256 or x.shape[0] * x.shape[1] > 65535:
        return f"heads of {size} channels, {x.shape[0]} x {x.shape[1]} of them"
    if group_size != size and group_size & (group_size - 1):
        return f"groups of {group_size} are no power of two and not the head of {size}"
    refusal = machine_refusal(x.device)
    if refusal is not None:
        return refusal
    config = (bits, size, group_size, label_bits, x.dtype)
    return checked_refusal(
        "quantize_unbiased",
        config,
        x.device,
        lambda: _self_check(x.device, x.dtype, size, bits, group_size, label_bits),
    )


def _self_check(
    device: torch.device, dtype: torch.dtype, size: int, bits: int, group_size: int, label_bits: int
) -> str | None:
    """Kernels against reference: nearly all bytes and steps alike."""
    generator = torch.Generator().manual_seed(size)
    count = (1 << label_bits) - 1
    table = 4 * torch.randn(1, 2, count, size, generator=generator)
    labels = torch.randint(count + 1, (1, 2, _TOKENS), generator=generator)
    x = gather_centroids(with_zero(table), labels)
    x += torch.randn(x.shape, generator=generator) * torch.rand(
        1, 2, _TOKENS, 1, generator=generator
    )
    centres = Centres(
        pack(labels.to(torch.uint8), bits=label_bits).to(device),
        (table * 8).to(E4M3).to(device),
        torch.full((1, 2, 1, 1), 0.125, device=device),
        label_bits,
        _TOKENS,
    )
    x = x.to(device, dtype)
    options: dict[str, Any] = {
        "bits": bits, "group_size": group_size, "centres": centres, "rotation": Rotation(size),
    }  # fmt: skip
    got, got_steps, largest = _kernel().quantize(x, **options)
    want, want_steps = reference.quantize(x, **options)
    share = float((got != want).float().mean())
    off = float((got_steps - want_steps).norm() / want_steps.norm())
    if not (share < 1e-2 and off < 1e-2):
        return f"self-check failed: {share:.1%} of the bytes differ, steps by {off:.1e}"
    codes, scale, most = _kernel().code_steps(got_steps, largest)
    want_codes, want_scale = coded_steps(got_steps)
    far = int((codes.int() - want_codes.int()).abs().amax())
    if far > 1 or not torch.equal(scale, want_scale):
        return f"self-check failed: codes of steps are off by {far}"
    if float(most.amax()) != float(x.abs().amax()):
        return "self-check failed: the largest magnitude is another"
    return None


def _kernel() -> Any:
    from videokv.kernels.quantize_unbiased import triton

    return triton
