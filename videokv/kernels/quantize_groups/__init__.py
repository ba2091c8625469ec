"""Round-to-nearest quantization of groups that share a step (2605.26266, Eq. 1).

    offset     Delta = round_scale((max - min) / L),  o = round_zero(min),  L = 2^bits - 1
               code = clamp(rint((x - o) / Delta), 0, L),        x^ = code Delta + o
    integer    z = rint(-min / Delta)
               code = clamp(rint(x / Delta) + z, 0, L),          x^ = (code - z) Delta
    symmetric  Delta = round_scale(max|x| / R),  R = 2^(bits - 1) - 1
               code = clamp(rint(x / Delta), -R, R) + R,         x^ = (code - R) Delta

Everything is float32 and uses the *stored* Delta and zero. Where Delta is 0 (constant groups, or a
range under the dtype's smallest number) the group comes back as its middle (symmetric: 0).
A head whose largest step lies outside the normal numbers of ``scale_dtype`` (E4M3: 2^-6 to 448)
gets a float32 normaliser, so that its steps keep their precision; other heads are not touched.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from videokv.kernels.quantize_groups import reference
from videokv.kernels.quantize_groups.layout import (
    GroupedCodes,
    blocks,
    per_token,
    reach,
    real_steps,
    unblocked,
)
from videokv.tensors import GroupFormat, require_finite

__all__ = [
    "GroupedCodes",
    "blocks",
    "dequantize_groups",
    "per_token",
    "quantize_groups",
    "reach",
    "real_steps",
    "require_chunk",
    "unblocked",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = 1e37  # ranges above it would overflow float32 arithmetic


def quantize_groups(
    x: Tensor, *, format: GroupFormat, what: str = "inputs", layer: int = 0
) -> GroupedCodes:
    """Quantize ``x`` ``[B, H, T, D]`` (float32, bfloat16 or float16, T >= 1).

    Integer zero points are stored in float32 where one of them is too large for ``zero_dtype`` to
    hold exactly (above 256 for bfloat16), and count as such. Synchronises once.
    Raises ValueError for NaN or infinity, naming ``what`` and ``layer``; for other dtypes and
    shapes; for heads that groups do not divide; for values beyond 1e37 or beyond ``zero_dtype``.
    """
    require_chunk(x)
    format.check_head_dim(x.shape[-1])
    raw, facts = reference.quantize(x, format=format)
    return _settled(raw, reference.Facts(*facts.tolist()), x, format, what, layer)


def dequantize_groups(grouped: GroupedCodes, *, format: GroupFormat, dtype: torch.dtype) -> Tensor:
    """Reconstruct ``[B, H, T, D]`` in ``dtype`` (the arithmetic is float32)."""
    return reference.dequantize(grouped, format=format, dtype=dtype)


def require_chunk(x: Tensor) -> None:
    """Raise ValueError unless ``x`` is what quantizers take: ``[B, H, T, D]``, not empty."""
    if x.ndim != 4 or x.dtype not in DTYPES or 0 in x.shape:
        raise ValueError(
            f"expected a non-empty tensor [B, H, T, D] of {DTYPES}, got {x.dtype} of shape "
            f"{tuple(x.shape)}"
        )


def _settled(
    raw: GroupedCodes, facts: reference.Facts, x: Tensor, format: GroupFormat, what: str, layer: int
) -> GroupedCodes:
    """Refuse what cannot be stored; keep the normaliser and wide zero points only if needed."""
    if not facts.magnitude < LARGEST:
        require_finite(x, what=what, layer=layer)
        raise ValueError(
            f"{what} of layer {layer} reach {facts.magnitude:.3g}; values beyond {LARGEST:.0e} "
            "cannot be quantized in float32: check the model's dtype and its inputs"
        )
    if facts.offset > torch.finfo(format.zero_dtype).max:
        raise ValueError(
            f"{what} of layer {layer} reach {facts.magnitude:.3g}: offsets do not fit zero_dtype "
            f"{format.zero_dtype}; use zero_dtype=torch.bfloat16"
        )
    if facts.overflow:
        warnings.warn(
            f"steps beyond the largest {format.scale_dtype}: a float32 normaliser per head is "
            "stored with such chunks (and counted)",
            stacklevel=4,
        )
    zeros = raw.zeros
    if zeros is not None and facts.code_of_zero <= _largest_exact_integer(format.zero_dtype):
        zeros = zeros.to(format.zero_dtype)
    return GroupedCodes(raw.codes, raw.steps, zeros, raw.normaliser if facts.normalised else None)


def _largest_exact_integer(dtype: torch.dtype) -> float:
    return 2 / torch.finfo(dtype).eps
