"""Small floats with a scale a group: FP8 (E4M3), MXFP4 and NVFP4 (E2M1).

    name    element  scale of a group                          group     bits an element
    fp8     E4M3     BF16, max|x| / 448                        a token   8 + 16 / d
    mxfp4   E2M1     power of two, 2^(floor(log2 max|x|) - 2)  32        4.25 (OCP MX 1.0)
    nvfp4   E2M1     E4M3, max|x| / 6 / s, s FP32 a head       16        4.5

Their spacing follows the value, so the noise has no single step: the variance of channel c is
(ulp_c scale)^2 / 12, and 12 times it stands where other quantizers have Delta^2. By default it is
averaged over groups of channels, so that few columns carry it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from videokv.kernels.pack_codes import pack, unpack
from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import EncodeContext, Quantizer
from videokv.quantizers import register
from videokv.quantizers.inputs import check_count, checked
from videokv.tensors import E4M3, E4M3_MAX, require_finite

E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGN = 8  # bit of a 4-bit code
LARGEST = 1e37  # a scale of larger values would overflow float32
NOISE_GROUP = 32

Element = Literal["e4m3", "e2m1"]
Scale = Literal["bf16", "power", "two_level"]


@dataclass(frozen=True)
class FloatFormat:
    """element: of a code. scale: how a group's scale is stored (table above: ``bf16``, ``power``
    of two, ``two_level``). group_size: channels that share it, None for the whole head.
    noise_group_size: channels whose variances are averaged (1: exact, a column a channel); None
    for the group, or the largest divisor of the head that 32 allows where the group is the head.
    """

    element: Element
    scale: Scale
    group_size: int | None
    noise_group_size: int | None = None

    def __post_init__(self) -> None:
        if self.element not in ("e4m3", "e2m1"):
            raise ValueError(f"element must be 'e4m3' or 'e2m1', got {self.element!r}")
        if self.scale not in ("bf16", "power", "two_level"):
            raise ValueError(f"scale must be 'bf16', 'power' or 'two_level', got {self.scale!r}")
        for name in ("group_size", "noise_group_size"):
            size = getattr(self, name)
            if size is not None:
                check_count(name, size)

    @property
    def bits(self) -> int:
        """Of a code."""
        return 8 if self.element == "e4m3" else 4

    @property
    def largest(self) -> float:
        """Magnitude of the largest element."""
        return E4M3_MAX if self.element == "e4m3" else E2M1_MAX

    def group(self, head_dim: int) -> int:
        """Channels that share a scale."""
        return self.group_size or head_dim

    def noise_group(self, head_dim: int) -> int:
        """Channels that share a noise weight."""
        return self.noise_group_size or self.group_size or math.gcd(NOISE_GROUP, head_dim)

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError where groups do not divide the head."""
        for name, size in (
            ("group_size", self.group(head_dim)),
            ("noise_group_size", self.noise_group(head_dim)),
        ):
            if head_dim % size:
                raise ValueError(f"{name} {size} does not divide head_dim {head_dim}")


@dataclass(frozen=True, eq=False)
class FloatChunk:
    """A chunk of small floats.

    packed: uint8 ``[B, H, T, bytes]``; scales ``[B, H, T, G]``: bfloat16, or uint8 (the exponent
    plus 127), or E4M3 times ``head_scale`` float32 ``[B, H, 1, 1]``.
    """

    packed: Tensor
    scales: Tensor
    head_scale: Tensor | None
    format: FloatFormat
    head_dim: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, D) of the tensor that was encoded."""
        batch, heads, tokens, _ = self.packed.shape
        return batch, heads, tokens, self.head_dim

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Reconstruct ``[B, H, T, D]``; the arithmetic is float32."""
        values = self._scaled(_value_table(self.format.element, self.packed.device))
        if dtype == torch.float16:
            values.clamp_(-65504.0, 65504.0)  # a rounded scale may pass the largest input
        return values.to(dtype)

    def noise(self) -> tuple[ScoreNoise, ...]:
        """12 Var = (ulp scale)^2, averaged over each noise group."""
        ulps = self._scaled(_ulp_table(self.format.element, self.packed.device))
        size = self.format.noise_group(self.head_dim)
        return (ScoreNoise(ulps.square_().unflatten(-1, (-1, size)).mean(-1), QueryMap(size)),)

    def _scaled(self, table: Tensor) -> Tensor:
        """What the table says of each code, times the scale: float32 ``[B, H, T, D]``."""
        codes = unpack(self.packed, bits=self.format.bits, count=self.head_dim)
        found = table.index_select(0, codes.reshape(-1).int()).view(*self.scales.shape, -1)
        scales = _real_scales(self.scales, self.head_scale, self.format)
        return found.mul_(scales.unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class FloatQuantizer:
    """Rounds to the nearest element of ``format`` (ties to even), saturating."""

    format: FloatFormat
    reads_queries: ClassVar[bool] = False
    reads_previous: ClassVar[bool] = False
    stackable: ClassVar[bool] = True

    def check(self, head_dim: int) -> None:
        """Raise ValueError where groups do not divide the head."""
        self.format.check_head_dim(head_dim)

    def encode(self, x: Tensor, context: EncodeContext) -> FloatChunk:
        """Pack ``[B, H, T, D]``. Synchronises once; ValueError names the layer where not finite."""
        x = checked(x)
        self.check(x.shape[-1])
        groups = x.float().unflatten(-1, (-1, self.format.group(x.shape[-1])))
        peaks = groups.abs().amax(-1)  # [B, H, T, G]
        _require_bounded(peaks, x, context)
        scales, head_scale = _fit_scales(peaks, self.format)
        step = _real_scales(scales, head_scale, self.format).unsqueeze(-1)
        ratio = groups / torch.where(step > 0, step, torch.inf)
        codes = _element_codes(ratio, self.format).flatten(-2)
        packed = pack(codes, bits=self.format.bits)
        return FloatChunk(packed, scales, head_scale, self.format, x.shape[-1])


def _require_bounded(peaks: Tensor, x: Tensor, context: EncodeContext) -> None:
    peak = float(peaks.amax())
    if peak < LARGEST:
        return
    require_finite(x, what=f"{context.role}s", layer=context.layer)
    raise ValueError(
        f"{context.role}s of layer {context.layer} reach {peak:.3g}; values beyond {LARGEST:.0e} "
        "cannot be scaled in float32: check the model's dtype and its inputs"
    )


def _fit_scales(peaks: Tensor, format: FloatFormat) -> tuple[Tensor, Tensor | None]:
    """Stored scales of groups with the largest magnitudes ``peaks``, and those of heads."""
    if format.scale == "bf16":
        return (peaks / format.largest).to(torch.bfloat16), None
    if format.scale == "power":
        # frexp's mantissa lies in [0.5, 1): floor(log2) is its exponent less 1. OCP MX takes off
        # the exponent of the largest element, 2 for E2M1 and 8 for E4M3.
        exponent = torch.frexp(peaks).exponent - 1 - math.floor(math.log2(format.largest))
        return (exponent + 127).clamp(1, 254).to(torch.uint8), None
    head_scale = peaks.amax((2, 3), keepdim=True) / (format.largest * E4M3_MAX)
    divisor = torch.where(head_scale > 0, head_scale, torch.inf) * format.largest
    return (peaks / divisor).clamp(max=E4M3_MAX).to(E4M3), head_scale


def _real_scales(scales: Tensor, head_scale: Tensor | None, format: FloatFormat) -> Tensor:
    """Scales as float32 ``[B, H, T, G]``."""
    if format.scale == "power":
        return (scales.int() << 23).view(torch.float32)  # 2^(code - 127): its exponent bits
    return scales.float() if head_scale is None else scales.float() * head_scale


def _element_codes(ratio: Tensor, format: FloatFormat) -> Tensor:
    """uint8 codes of float32 multiples of the scale."""
    bounded = ratio.clamp(-format.largest, format.largest)
    if format.element == "e4m3":
        return bounded.to(E4M3).view(torch.uint8)
    size = bounded.abs()
    octave = (size >= 2).float() + (size >= 4)  # spacing 0.5, 1, 2
    index = size.mul_(torch.exp2(1 - octave)).round_().add_(octave, alpha=2)
    negative = (bounded < 0) & (index > 0)
    return (index + SIGN * negative).to(torch.uint8)


@functools.lru_cache(maxsize=8)
def _value_table(element: Element, device: torch.device) -> Tensor:
    """The value of every code, float32."""
    if element == "e4m3":
        return torch.arange(256, dtype=torch.uint8).view(E4M3).float().to(device)
    values = torch.tensor(E2M1_VALUES)
    return torch.cat([values, -values]).to(device)


@functools.lru_cache(maxsize=8)
def _ulp_table(element: Element, device: torch.device) -> Tensor:
    """The spacing of the elements around every code, float32."""
    if element == "e4m3":
        exponent = (torch.arange(256) >> 3) & 15
        return torch.exp2(exponent.clamp(min=1).float() - 10).to(device)
    size = torch.tensor(E2M1_VALUES).repeat(2)
    return torch.exp2((size >= 2).float() + (size >= 4).float() - 1).to(device)


def _pair(
    name: str, own_bits: int, bits: int | None, format: FloatFormat
) -> tuple[Quantizer, Quantizer]:
    if bits not in (None, own_bits):
        raise ValueError(f"{name} has a fixed width of {own_bits} bits, got bits={bits!r}")
    quantizer = FloatQuantizer(format)
    return quantizer, quantizer


@register("fp8", bits=(), summary="FP8 (E4M3) with a BF16 scale a token")
def build_fp8(
    bits: int | None = None, *, group_size: int | None = None, noise_group_size: int | None = None
) -> tuple[Quantizer, Quantizer]:
    """Keys and values alike; options of ``FloatFormat``."""
    return _pair("fp8", 8, bits, FloatFormat("e4m3", "bf16", group_size, noise_group_size))


@register("mxfp4", bits=(), summary="FP4 (E2M1) with a power-of-two scale for 32 channels")
def build_mxfp4(
    bits: int | None = None, *, noise_group_size: int | None = None
) -> tuple[Quantizer, Quantizer]:
    """Keys and values alike; options of ``FloatFormat``."""
    return _pair("mxfp4", 4, bits, FloatFormat("e2m1", "power", 32, noise_group_size))


@register("nvfp4", bits=(), summary="FP4 (E2M1) with an E4M3 scale for 16 channels")
def build_nvfp4(
    bits: int | None = None, *, noise_group_size: int | None = None
) -> tuple[Quantizer, Quantizer]:
    """Keys and values alike; options of ``FloatFormat``."""
    return _pair("nvfp4", 4, bits, FloatFormat("e2m1", "two_level", 16, noise_group_size))
