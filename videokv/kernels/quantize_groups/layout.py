"""How grouped codes lie in memory, and the little arithmetic that all bodies share.

axis      steps and zeros      a step serves
token     [B, H, T, D / g]     g channels of one token
channel   [B, H, ceil(T / g), D]   g tokens (the last group: fewer) of one channel
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from videokv.tensors import GroupFormat


@dataclass(frozen=True, eq=False)
class GroupedCodes:
    """A tensor ``[B, H, T, D]`` as codes and the numbers that turn them back.

    codes: uint8 ``[B, H, T, D]``, below ``2**bits``; symmetric codes are stored plus ``reach``.
    steps: in the format's ``scale_dtype``; 0 where a group has no range that the dtype can hold.
    zeros: None if symmetric. Offset form: the group's minimum (middle where the step is 0). Integer
        form: the code of zero; where the step is 0, the constant of the group itself.
    normaliser: float32 ``[B, H, 1, 1]`` that multiplies the steps, or None for 1.
    """

    codes: Tensor
    steps: Tensor
    zeros: Tensor | None
    normaliser: Tensor | None


@dataclass(frozen=True, eq=False)
class PackedGroups:
    """``GroupedCodes`` whose codes are packed, uint8 ``[B, H, T, bytes]``."""

    packed: Tensor
    steps: Tensor
    zeros: Tensor | None
    normaliser: Tensor | None


def reach(bits: int) -> int:
    """Largest magnitude of a symmetric code (2 bits: 1, ternary)."""
    return (1 << (bits - 1)) - 1


def quotient(x: Tensor, divisor: float) -> Tensor:
    """``x / divisor`` rounded to nearest on every device, float32.

    On a GPU PyTorch multiplies by the reciprocal of a Python number, which is a bit off; it does
    divide by a tensor.
    """
    return x / x.new_full((), divisor)


def real_steps(steps: Tensor, normaliser: Tensor | None) -> Tensor:
    """Delta in float32: the stored steps times the normaliser."""
    real = steps.to(torch.float32)
    return real if normaliser is None else real * normaliser


def blocks(x: Tensor, *, format: GroupFormat) -> tuple[Tensor, int]:
    """``x`` with its groups split off, and the dimension that runs inside a group.

    token: ``[B, H, T, G, g]``, 4. channel: ``[B, H, G, g, D]``, 3; a short last group is filled up
    with copies of the last token, which change no extreme.
    """
    size = format.group_size
    if format.axis == "token":
        return x.unflatten(-1, (-1, size)), 4
    missing = -x.shape[2] % size
    if missing:
        x = torch.cat([x, x[:, :, -1:].expand(-1, -1, missing, -1)], 2)
    return x.unflatten(2, (-1, size)), 3


def unblocked(grouped: Tensor, *, format: GroupFormat, tokens: int) -> Tensor:
    """Undo ``blocks``: ``[B, H, tokens, D]``."""
    if format.axis == "token":
        return grouped.flatten(-2)
    return grouped.flatten(2, 3)[:, :, :tokens]


def per_token(numbers: Tensor, *, format: GroupFormat, tokens: int) -> Tensor:
    """Numbers of groups as ``[B, H, tokens, G or D]``: what each token sees (a view if it can)."""
    if format.axis == "token":
        return numbers
    if numbers.shape[2] == 1:
        return numbers.expand(-1, -1, tokens, -1)
    return numbers.repeat_interleave(format.group_size, 2)[:, :, :tokens]
