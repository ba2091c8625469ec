"""PyTorch body: the oracle of the kernel, and the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.kernels.pack_codes import pack, unpack
from videokv.kernels.quantize_groups.layout import quotient
from videokv.kernels.quantize_two_level.layout import BITS, TOP, TwoLevelCodes, head_scale


def spans(x: Tensor, *, group_size: int) -> Tensor:
    """Widest range of a group of each head, zero included: float32 ``[B, H, 1, 1]``."""
    groups = x.unflatten(-1, (-1, group_size))
    low = groups.amin(-1).clamp(max=0)
    return (groups.amax(-1).clamp(min=0) - low).amax((2, 3), keepdim=True)


def encode(x: Tensor, widest: Tensor, *, group_size: int) -> TwoLevelCodes:
    """Codes of float32 ``x``; widest: of ``spans``."""
    groups = x.unflatten(-1, (-1, group_size))
    # The grid must hold 0, for its zero point is one of its codes.
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    span = groups.amax(-1, keepdim=True).clamp(min=0) - low
    scale = head_scale(widest).unsqueeze(-1)
    steps = (quotient(span, TOP) / scale.float()).round_().clamp_(1, 255).mul_(span > 0)
    divisor = torch.where(steps > 0, steps * scale.float(), torch.inf)
    zeros = (-low / divisor).round_().clamp_(0, TOP)
    codes = (groups / divisor).round_().add_(zeros).clamp_(0, TOP)
    return TwoLevelCodes(
        packed=pack(codes.to(torch.uint8).flatten(2), bits=BITS),
        zeros=pack(zeros.to(torch.uint8).flatten(2), bits=BITS),
        steps=steps.to(torch.uint8).squeeze(-1),
        scale=scale.squeeze(-1),
    )


def error(x: Tensor, codes: TwoLevelCodes, *, group_size: int) -> Tensor:
    """What the codes of float32 ``x`` lack: x - Delta (code - zero)."""
    groups = x.unflatten(-1, (-1, group_size))
    numbers = unpack(codes.packed, bits=BITS, count=x[0, 0].numel()).float().view(groups.shape)
    zeros = unpack(codes.zeros, bits=BITS, count=codes.steps[0, 0].numel()).float()
    steps = codes.steps.float() * codes.scale.float()
    numbers.sub_(zeros.view(steps.shape).unsqueeze(-1)).mul_(steps.unsqueeze(-1))
    return torch.sub(groups, numbers, out=numbers).view(x.shape)
