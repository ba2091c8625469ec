"""PyTorch bodies of the groupwise quantizer: the oracle of every kernel, and the CPU path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from videokv.kernels.quantize_groups.layout import (
    GroupedCodes,
    blocks,
    quotient,
    reach,
    real_steps,
    unblocked,
)
from videokv.tensors import GroupFormat


class Facts(NamedTuple):
    """What the host has to know about a quantized tensor, in one transfer of numbers.

    magnitude: largest absolute value, NaN where there is one.
    offset: largest absolute offset (or constant of a group without a step).
    code_of_zero: largest absolute integer zero point.
    normalised, overflow: 1 where a head needs the normaliser, and where it does because its steps
        are too large.
    """

    magnitude: float
    offset: float
    code_of_zero: float
    normalised: float
    overflow: float


def quantize(x: Tensor, *, format: GroupFormat) -> tuple[GroupedCodes, Tensor]:
    """Codes, with float32 zeros and the normaliser always there, and ``Facts`` as a tensor."""
    grouped, inside = blocks(x.detach().to(torch.float32), format=format)
    low = grouped.amin(inside, keepdim=True)
    high = grouped.amax(inside, keepdim=True)
    magnitude = torch.maximum(high, -low).abs()  # a step must not carry the sign of -0
    if format.symmetric:
        ideal = quotient(magnitude, reach(format.bits))
    else:
        ideal = quotient(high - low, _top(format))
    steps, normaliser, normalised, overflow = _stored_steps(ideal, format)
    step = real_steps(steps, normaliser)
    zeros = None if format.symmetric else _zeros(low, high, step, format)
    codes = unblocked(_codes(grouped, step, zeros, format), format=format, tokens=x.shape[2])
    offset, code_of_zero = _zero_facts(zeros, step, format)
    raw = GroupedCodes(
        codes.contiguous(),
        steps.squeeze(inside),
        None if zeros is None else zeros.squeeze(inside),
        normaliser.squeeze(-1),
    )
    return raw, torch.stack([magnitude.amax(), offset, code_of_zero, normalised, overflow])


def _top(format: GroupFormat) -> int:
    return (1 << format.bits) - 1


def _stored_steps(ideal: Tensor, format: GroupFormat) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Steps in ``scale_dtype``, the normaliser ``[B, H, 1, 1, 1]`` and whether it is used."""
    limits = torch.finfo(format.scale_dtype)  # type: ignore[arg-type]
    peak = ideal.amax((2, 3, 4), keepdim=True)
    overflow = peak > limits.max
    used = overflow | ((peak > 0) & (peak < limits.smallest_normal))
    tiny = torch.finfo(torch.float32).smallest_normal
    normaliser = torch.where(used, quotient(peak, limits.max).clamp_min(tiny), 1.0)
    # Clamped before the cast: what an unsaturated cast does differs between paths and versions.
    steps = (ideal / normaliser).clamp(max=limits.max).to(format.scale_dtype)
    return steps, normaliser, used.any().float(), overflow.any().float()


def _zeros(low: Tensor, high: Tensor, step: Tensor, format: GroupFormat) -> Tensor:
    """Zero points in float32, offsets and constants rounded to ``zero_dtype`` (or infinite)."""
    middle = low + (high - low) / 2  # exactly low for a constant group
    offset = low if format.zero_point == "offset" else (-low / step).round().add_(0.0)  # no -0
    rounded = torch.where(step > 0, offset, middle).to(format.zero_dtype)
    if format.zero_point == "offset":
        return rounded.to(torch.float32)
    return torch.where(step > 0, offset, rounded.to(torch.float32))


def _codes(grouped: Tensor, step: Tensor, zeros: Tensor | None, format: GroupFormat) -> Tensor:
    divisor = torch.where(step > 0, step, torch.inf)  # no step: every quotient is 0
    if zeros is None:
        bound = reach(format.bits)
        codes = (grouped / divisor).round_().clamp_(-bound, bound).add_(bound)
    elif format.zero_point == "offset":
        codes = (grouped - zeros).div_(divisor).round_().clamp_(0, _top(format))
    else:
        code_of_zero = torch.where(step > 0, zeros, 0)
        codes = (grouped / divisor).round_().add_(code_of_zero).clamp_(0, _top(format))
    return codes.to(torch.uint8)


def _zero_facts(zeros: Tensor | None, step: Tensor, format: GroupFormat) -> tuple[Tensor, Tensor]:
    """Largest absolute offset or constant, and largest absolute integer zero point."""
    nothing = step.new_zeros(())
    if zeros is None:
        return nothing, nothing
    if format.zero_point == "offset":
        return zeros.abs().amax(), nothing
    integers = torch.where(step > 0, zeros, 0).abs().amax()
    return torch.where(step > 0, 0, zeros).abs().amax(), integers


def away_from_zero(x: Tensor, grouped: GroupedCodes, *, format: GroupFormat) -> Tensor:
    """The symmetric codes of float32 ``x`` (groups along channels) with halves rounded away from
    zero, uint8, shifted like those of ``grouped``."""
    step = real_steps(grouped.steps, grouped.normaliser).unsqueeze(-1)
    ratio = x.unflatten(-1, (-1, format.group_size)) / torch.where(step > 0, step, torch.inf)
    whole = ratio.trunc()
    codes = whole + (ratio - whole).mul_(2).trunc_()
    bound = reach(format.bits)
    return codes.clamp_(-bound, bound).add_(bound).to(torch.uint8).flatten(-2)


def dequantize(grouped: GroupedCodes, *, format: GroupFormat, dtype: torch.dtype) -> Tensor:
    """See ``videokv.kernels.quantize_groups.dequantize_groups``."""
    step = real_steps(grouped.steps, grouped.normaliser)
    offset = _offset(grouped.zeros, step, format)
    values = grouped.codes.to(torch.float32)
    for part, part_step, part_offset in _parts(values, step, offset, format):
        part.mul_(part_step).add_(part_offset)  # two passes: faster here than one addcmul
    if dtype == torch.float16:
        values.clamp_(-65504.0, 65504.0)  # a rounded-up step may pass the largest input
    return values.to(dtype)


def _offset(zeros: Tensor | None, step: Tensor, format: GroupFormat) -> Tensor:
    """What code 0 decodes to, per group."""
    if zeros is None:
        return step * -reach(format.bits)
    zeros = zeros.to(torch.float32)
    if format.zero_point == "offset":
        return zeros
    return torch.where(step > 0, zeros * -step, zeros)


def _parts(
    values: Tensor, step: Tensor, offset: Tensor, format: GroupFormat
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views of ``values`` with the steps and offsets that broadcast to them."""
    size = format.group_size
    if format.axis == "token":
        yield values.unflatten(-1, (-1, size)), step.unsqueeze(-1), offset.unsqueeze(-1)
        return
    tokens = values.shape[2]
    whole = tokens // size
    if whole:
        head = values[:, :, : whole * size].unflatten(2, (whole, size))
        yield head, step[:, :, :whole].unsqueeze(3), offset[:, :, :whole].unsqueeze(3)
    if tokens % size:
        yield values[:, :, whole * size :], step[:, :, whole:], offset[:, :, whole:]
