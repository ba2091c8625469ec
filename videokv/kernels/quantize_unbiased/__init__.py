"""Unbiased codes of rotated residuals: rotate, try five grids, pack; on a GPU in one kernel.

    y = H (x - mu[z]),     c = code - (L - 1) / 2,     Delta = y.y / (y.c)

``layout`` says how codes, steps and labels lie in memory, ``reference`` is the PyTorch body.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from videokv.kernels.gpu import checked_refusal, machine_refusal, say_once, wants_kernels
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

_CORNER = 304  # tokens that a self-check looks at, a multiple of 8
_SMALL = 1e-5  # steps below this share of the tensor's largest value are rounding of the sums


class UnbiasedCodes(NamedTuple):
    """packed uint8 ``[B, H, T, bytes]``; steps uint8 ``[B, H, T, G]``; scale float32
    ``[B, H, 1, 1]``; largest: a tensor of largest magnitudes of the input, not finite where it is
    not."""

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
        refusal = kernel_refusal(
            x, bits=bits, group_size=group_size, centres=centres, rotation=rotation
        )
        if refusal is None:
            packed, ideal, largest = _kernel().quantize(
                x, bits=bits, group_size=group_size, centres=centres, rotation=rotation
            )
            return UnbiasedCodes(packed, *coded_steps(ideal), largest.amax())
        say_once(f"quantize_unbiased runs in PyTorch steps: {refusal}")
    packed, ideal = reference.quantize(
        x, bits=bits, group_size=group_size, centres=centres, rotation=rotation
    )
    return UnbiasedCodes(packed, *coded_steps(ideal), x.abs().amax())


def kernel_refusal(
    x: Tensor, *, bits: int, group_size: int, centres: Centres, rotation: Rotation
) -> str | None:
    """Why the Triton kernel does not serve this, or None. Its first use is checked here."""
    size = x.shape[3]
    if size > 256 or x.shape[0] * x.shape[1] > 65535:
        return f"heads of {size} channels, {x.shape[0]} x {x.shape[1]} of them"
    if group_size != size and group_size & (group_size - 1):
        return f"groups of {group_size} are no power of two and not the head of {size}"
    refusal = machine_refusal(x.device)
    if refusal is not None:
        return refusal
    config = (bits, size, group_size, centres.label_bits, x.dtype)
    return checked_refusal(
        "quantize_unbiased",
        config,
        x.device,
        lambda: _self_check(x, bits, group_size, centres, rotation),
    )


def _self_check(
    x: Tensor, bits: int, group_size: int, centres: Centres, rotation: Rotation
) -> str | None:
    """Kernel against reference on a corner: nearly all bytes and steps alike."""
    # Eight labels fill whole bytes at every width: a corner of whole eights needs no packing.
    tokens = x.shape[2] if x.shape[2] <= _CORNER else _CORNER
    length = centres.ids.shape[2] if tokens == x.shape[2] else tokens // 8 * centres.label_bits
    corner = x.detach()[:2, :2, :tokens]
    some = Centres(
        centres.ids[:2, :2, :length].contiguous(),
        centres.table[:2, :2],
        centres.scale[:2, :2],
        centres.label_bits,
        tokens,
    )
    options: dict[str, Any] = {
        "bits": bits, "group_size": group_size, "centres": some, "rotation": rotation,
    }  # fmt: skip
    got, got_steps, _ = _kernel().quantize(corner, **options)
    want, want_steps = reference.quantize(corner, **options)
    limit = _SMALL * float(corner.float().abs().amax())
    large = (want_steps > limit).any(-1)
    if not bool(large.any()):
        return None if float(got_steps.amax()) <= 2 * limit else "self-check failed: steps of noise"
    share = float((got != want)[large].float().mean())
    off = float((got_steps - want_steps).norm() / want_steps.norm())
    if share < 1e-2 and off < 1e-2:
        return None
    return f"self-check failed: {share:.1%} of the bytes differ, steps by {off:.1e}"


def _kernel() -> Any:
    from videokv.kernels.quantize_unbiased import triton

    return triton
