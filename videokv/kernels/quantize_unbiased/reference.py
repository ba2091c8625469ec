"""PyTorch bodies: the oracle of the kernels, and the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.kernels.pack_codes import pack
from videokv.kernels.quantize_unbiased.layout import (
    GAUSSIAN_STEP,
    TRIED,
    Centres,
    half_range,
)
from videokv.rotation import Rotation


def quantize(
    x: Tensor, *, bits: int, group_size: int, centres: Centres, rotation: Rotation
) -> tuple[Tensor, Tensor]:
    """Packed codes uint8 ``[B, H, T, bytes]`` and ideal steps float32 ``[B, H, T, G]``."""
    rotated = rotation.apply(x.float() - centres.gather())
    codes, ideal = unbiased_codes(rotated.unflatten(-1, (-1, group_size)), bits=bits)
    return pack(codes.flatten(-2), bits=bits), ideal


def unbiased_codes(groups: Tensor, *, bits: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 ``[..., g]`` and steps ``[...]`` of float32 groups; step 0 where all are zero.

    Among the tried grids the one with the largest (y.c)^2 / c.c wins: the smallest error once its
    step is y.y / (y.c).
    """
    half = half_range(bits)
    peak = groups.abs().amax(-1, keepdim=True)
    y = groups / torch.where(peak > 0, peak, 1.0)  # squares of tiny numbers would vanish
    square = y.square().sum(-1, keepdim=True)
    unit = (square / y.shape[-1]).sqrt().mul_(GAUSSIAN_STEP[bits]).clamp_(min=1e-20)
    codes, product, best = _graded(y, unit * TRIED[0], half)
    for factor in TRIED[1:]:
        found = _graded(y, unit * factor, half)
        better = found[2] > best
        codes = torch.where(better, found[0], codes)
        product = torch.where(better, found[1], product)
        best = torch.where(better, found[2], best)
    step = torch.where(product > 0, square / product, 0.0) * peak
    return codes.add_(half).to(torch.uint8), step.squeeze(-1)


def _graded(y: Tensor, step: Tensor, half: float) -> tuple[Tensor, Tensor, Tensor]:
    """Codes around zero, y.c and (y.c)^2 / c.c."""
    codes = (y / step).add_(half).round_().clamp_(0, 2 * half).sub_(half)
    product = (y * codes).sum(-1, keepdim=True)
    return codes, product, product.square() / codes.square().sum(-1, keepdim=True)
