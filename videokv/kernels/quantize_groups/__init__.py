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
from typing import Any

import torch
from torch import Tensor

from videokv.kernels.assign_centroids.layout import Clusters
from videokv.kernels.gpu import (
    CannotCheck,
    checked_refusal,
    machine_refusal,
    say_once,
    wants_kernels,
)
from videokv.kernels.pack_codes import pack
from videokv.kernels.quantize_groups import reference
from videokv.kernels.quantize_groups.layout import (
    GroupedCodes,
    PackedGroups,
    blocks,
    per_token,
    reach,
    real_steps,
    unblocked,
)
from videokv.rotation import Rotation
from videokv.tensors import GroupFormat, require_finite

__all__ = [
    "GroupedCodes",
    "PackedGroups",
    "blocks",
    "dequantize_groups",
    "kernel_refusal",
    "per_token",
    "quantize_groups",
    "quantize_packed",
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
    raw, numbers = reference.quantize(x, format=format)
    facts = reference.Facts(*numbers.tolist())
    _require_storable(facts, x, format, what, layer)
    normaliser = raw.normaliser if facts.normalised else None
    return GroupedCodes(raw.codes, raw.steps, _stored(raw.zeros, facts, format), normaliser)


def quantize_packed(
    x: Tensor,
    *,
    format: GroupFormat,
    what: str = "inputs",
    layer: int = 0,
    rotation: Rotation | None = None,
    clusters: Clusters | None = None,
    away: bool = False,
) -> PackedGroups:
    """``quantize_groups`` of ``x``, packed; on a GPU in one kernel.

    rotation: applied first. clusters: their centroids are subtracted first. away: symmetric codes
    round halves away from zero (as Quant-VideoGen does), not to even.
    The same codes, steps and zeros as quantizing and packing one after the other (a rotation
    differs in the last bit of float32 sums). Synchronises once and raises as ``quantize_groups``,
    and where a rotation and clusters come together.
    """
    require_chunk(x)
    format.check_head_dim(x.shape[-1])
    if rotation is not None and clusters is not None:
        raise ValueError("a rotation and clusters came together; give one of them, or neither")
    if wants_kernels(x.device):
        refusal = kernel_refusal(x, format=format, rotation=rotation, clusters=clusters, away=away)
        if refusal is None:
            raw, known = _kernel().quantize(
                x.detach(), format=format, rotation=rotation, clusters=clusters, away=away
            )
            if known.magnitude < LARGEST and not known.normalised:
                _require_storable(known, x, format, what, layer)
                zeros = _stored(raw.zeros, known, format)
                return PackedGroups(raw.packed, raw.steps, zeros, None)
        else:
            say_once(f"quantize_groups runs in PyTorch steps: {refusal}")
    x = _prepared(x, rotation, clusters)
    grouped = quantize_groups(x, format=format, what=what, layer=layer)
    codes = reference.away_from_zero(x, grouped, format=format) if away else grouped.codes
    packed = pack(codes, bits=format.bits)
    return PackedGroups(packed, grouped.steps, grouped.zeros, grouped.normaliser)


def kernel_refusal(
    x: Tensor,
    *,
    format: GroupFormat,
    rotation: Rotation | None = None,
    clusters: Clusters | None = None,
    away: bool = False,
) -> str | None:
    """Why the Triton kernel does not serve this, or None. Its first use is checked here."""
    size, group = x.shape[-1], format.group_size
    if group & (group - 1):
        return f"groups of {group} are no power of two"
    if size > 256 or x.shape[0] * x.shape[1] > 65535:
        return f"heads of {size} channels, {x.shape[0]} x {x.shape[1]} of them"
    if format.axis == "channel" and not 16 <= group <= 128:
        return f"groups of {group} tokens; 16 to 128 fit into a block"
    if format.axis == "channel" and rotation is not None:
        return "groups along rotated tokens"
    if rotation is not None and (size & (size - 1) or size < 16):
        return f"a rotation of {size} channels, which is not exact in 16 bits"
    refusal = machine_refusal(x.device)
    if refusal is not None:
        return refusal
    config = (format, size, x.dtype, rotation is not None, clusters is not None, away)
    return checked_refusal(
        "quantize_groups",
        config,
        x.device,
        lambda: _self_check(x, format, rotation, clusters, away),
    )


def _prepared(x: Tensor, rotation: Rotation | None, clusters: Clusters | None) -> Tensor:
    """Rotated, or without its centroids, in float32; else as it is."""
    if rotation is not None:
        return rotation.apply(x.detach().to(torch.float32))
    if clusters is not None:
        centroids = clusters.gather()
        return torch.sub(x.detach().to(torch.float32), centroids, out=centroids)
    return x


def _self_check(
    x: Tensor,
    format: GroupFormat,
    rotation: Rotation | None,
    clusters: Clusters | None,
    away: bool,
) -> str | None:
    """Kernel against reference on a corner: the same bits, or with a rotation nearly all."""
    corner = x.detach()[:2, :2, :300]
    if clusters is not None:
        clusters = Clusters(clusters.ids[:2, :2, :300], clusters.table[:2, :2])
    got, _ = _kernel().quantize(
        corner, format=format, rotation=rotation, clusters=clusters, away=away
    )
    corner = _prepared(corner, rotation, clusters)
    want, facts = reference.quantize(corner, format=format)
    if not bool(corner.isfinite().all()):
        raise CannotCheck("inputs are not finite, which checks no kernel")
    if facts[3]:
        raise CannotCheck("this tensor needs a normaliser, which the kernel does not give")
    codes = reference.away_from_zero(corner, want, format=format) if away else want.codes
    codes = pack(codes, bits=format.bits)
    unlike = (got.packed != codes).float().mean() + (got.steps.float() != want.steps.float()).sum()
    if got.zeros is not None and want.zeros is not None:
        unlike = unlike + (got.zeros.float() != want.zeros.to(got.zeros.dtype).float()).sum()
    if rotation is None:
        return None if float(unlike) == 0 else "self-check failed: other bits than the reference"
    share = float((got.packed != codes).float().mean())
    return None if share < 1e-2 else f"self-check failed: {share:.1%} of the bytes differ"


def _kernel() -> Any:
    from videokv.kernels.quantize_groups import triton

    return triton


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


def _require_storable(
    facts: reference.Facts, x: Tensor, format: GroupFormat, what: str, layer: int
) -> None:
    """Raise ValueError for what cannot be stored; say that a normaliser is needed."""
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


def _stored(zeros: Tensor | None, facts: reference.Facts, format: GroupFormat) -> Tensor | None:
    """Zero points in the dtype of the format, but where it does not hold one of them exactly."""
    fits = facts.code_of_zero <= _largest_exact_integer(format.zero_dtype)
    return zeros if zeros is None or not fits else zeros.to(format.zero_dtype)


def _largest_exact_integer(dtype: torch.dtype) -> float:
    return 2 / torch.finfo(dtype).eps
