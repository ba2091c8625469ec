"""The same in PyTorch steps, in float32: the oracle of the kernel, and the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.kernels.pack_codes import unpack
from videokv.kernels.quantize_groups.layout import reach
from videokv.kernels.quantize_unbiased.layout import half_range, real_steps
from videokv.kernels.reconstruct.parts import LowRank, Parts
from videokv.kernels.reconstruct.rope import Rope
from videokv.tensors import E4M3, E4M3_MAX

HALF_MAX = 65504.0


def reconstruct(
    parts: Parts, out: Tensor, *, factor: Tensor | None, rope: Rope | None = None
) -> None:
    """See the package; ``out`` is ``[B, H, T, D]``."""
    values = _codes_times_steps(parts)
    for clusters in parts.stages:
        values += clusters.gather()
    if parts.rotation is not None:
        values = parts.rotation.invert(values)
    if parts.centres is not None:
        values += parts.centres.gather()
    if parts.low_rank is not None:
        values = _repaired(values, parts.low_rank.dense(parts.tokens))
    if rope is not None:
        values = rope.turn(values)
    if factor is not None:
        values = values * factor
    out.copy_(saturated(values, out.dtype))


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` within the range of ``dtype`` where its casts overflow; a cast is left to do."""
    limit = {torch.float16: HALF_MAX, E4M3: E4M3_MAX}.get(dtype)
    return values if limit is None else values.clamp(-limit, limit)


def _codes_times_steps(parts: Parts) -> Tensor:
    """Float32 ``[B, H, T, D]``."""
    batch, heads, tokens, size = parts.shape
    step = _each(_steps(parts), parts)
    if parts.zero == "packed":
        groups = size // parts.group_size
        assert parts.zeros is not None
        zeros = unpack(parts.zeros, bits=parts.bits, count=tokens * groups)
        codes = unpack(parts.codes, bits=parts.bits, count=tokens * size)
        zeros = _each(zeros.view(batch, heads, tokens, groups).float(), parts)
        return (codes.view(parts.shape).float() - zeros) * step
    codes = unpack(parts.codes, bits=parts.bits, count=size).float()
    if parts.zero == "centred":
        return (codes - half_range(parts.bits)) * step
    if parts.zeros is None:
        return codes * step + step * -reach(parts.bits)
    zeros = _each(parts.zeros.float(), parts)
    if parts.zero == "integer":
        zeros = torch.where(step > 0, zeros * -step, zeros)
    return codes * step + zeros


def _steps(parts: Parts) -> Tensor:
    """Delta of each group in float32."""
    if parts.log_steps:
        assert parts.scale is not None
        return real_steps(parts.steps, parts.scale)
    step = parts.steps.float()
    return step if parts.scale is None else step * parts.scale.float()


def _each(numbers: Tensor, parts: Parts) -> Tensor:
    """Numbers of groups for every element ``[B, H, T, D]``."""
    if parts.axis == "token":
        return numbers.repeat_interleave(parts.group_size, 3)
    return numbers.repeat_interleave(parts.group_size, 2)[:, :, : parts.tokens]


def _repaired(values: Tensor, low_rank: LowRank) -> Tensor:
    coefficients = low_rank.codes.float() * low_rank.scales.float()
    return values + coefficients @ low_rank.basis.float().mT
