"""Round-to-nearest in groups, along channels or tokens: the RTN baseline and everyone's residual.

Asymmetric codes with an E4M3 step and a BF16 zero cost ``bits + 24 / group_size`` bits an element,
symmetric ones ``bits + 8 / group_size``; 8-bit codes have a BF16 step, 8 / group_size more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from videokv.kernels.pack_codes import unpack
from videokv.kernels.quantize_groups import (
    GroupedCodes,
    dequantize_groups,
    per_token,
    quantize_packed,
    real_steps,
)
from videokv.kernels.reconstruct import Parts, fused
from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import EncodeContext, Quantizer
from videokv.quantizers import register
from videokv.rotation import Rotation
from videokv.tensors import SUPPORTED_BITS, GroupFormat

ZERO_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class GroupedChunk:
    """A chunk ``[B, H, T, D]`` in groups.

    packed: uint8 ``[B, H, T, bytes]``, the codes of a token one after another.
    steps, zeros, normaliser: as in ``kernels.quantize_groups.GroupedCodes``.
    """

    packed: Tensor
    steps: Tensor
    zeros: Tensor | None
    normaliser: Tensor | None
    format: GroupFormat
    head_dim: int

    @property
    def format_by_data(self) -> bool:
        """Whether the numbers asked for a normaliser or for wider zero points."""
        wide = self.zeros is not None and self.zeros.dtype != self.format.zero_dtype
        return wide or self.normaliser is not None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, D)."""
        batch, heads, tokens, _ = self.packed.shape
        return batch, heads, tokens, self.head_dim

    def codes(self) -> Tensor:
        """uint8 ``[B, H, T, D]``."""
        return unpack(self.packed, bits=self.format.bits, count=self.head_dim)

    def parts(self) -> Parts:
        """Itself, as the reconstruction kernel sees it."""
        return Parts(
            codes=self.packed,
            bits=self.format.bits,
            tokens=self.packed.shape[2],
            head_dim=self.head_dim,
            group_size=self.format.group_size,
            steps=self.steps,
            axis=self.format.axis,
            scale=self.normaliser,
            zero="none" if self.zeros is None else self.format.zero_point,
            zeros=self.zeros,
        )

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Reconstruct ``[B, H, T, D]``; transient on the CPU: a float32 copy and the codes."""
        done = fused(self, dtype)
        if done is not None:
            return done
        grouped = GroupedCodes(self.codes(), self.steps, self.zeros, self.normaliser)
        return dequantize_groups(grouped, format=self.format, dtype=dtype)

    def noise(self) -> tuple[ScoreNoise, ...]:
        """Delta^2: one feature a group of channels, or one a channel where groups run along tokens.

        Uniform noise of variance Delta^2 / 12 in every channel of a group (2605.26266, Eq. 13).
        """
        squares = real_steps(self.steps, self.normaliser).square()
        weights = per_token(squares, format=self.format, tokens=self.packed.shape[2])
        size = self.format.group_size if self.format.axis == "token" else 1
        return (ScoreNoise(weights, QueryMap(size)),)


@dataclass(frozen=True)
class Groupwise:
    """Round to nearest in the groups that ``format`` describes."""

    format: GroupFormat
    reads_queries: ClassVar[bool] = False
    reads_previous: ClassVar[bool] = False
    stackable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.format.symmetric and self.format.zero_point != "offset":
            raise ValueError(
                f"symmetric codes have no zero point, got zero_point={self.format.zero_point!r}; "
                "leave it out or use symmetric=False"
            )
        if self.format.zero_dtype not in ZERO_DTYPES:
            raise ValueError(
                f"zero_dtype must be one of {ZERO_DTYPES}, got {self.format.zero_dtype}"
            )

    def check(self, head_dim: int) -> None:
        """Raise ValueError where ``group_size`` does not divide ``head_dim`` (axis "token")."""
        self.format.check_head_dim(head_dim)

    def encode(
        self, x: Tensor, context: EncodeContext, *, rotation: Rotation | None = None
    ) -> GroupedChunk:
        """Pack ``[B, H, T, D]``, rotated first where a rotation is given.

        ValueError names the layer where it is not finite.
        """
        grouped = quantize_packed(
            x,
            format=self.format,
            what=f"{context.role}s",
            layer=context.layer,
            rotation=rotation,
        )
        return GroupedChunk(
            packed=grouped.packed,
            steps=grouped.steps,
            zeros=grouped.zeros,
            normaliser=grouped.normaliser,
            format=self.format,
            head_dim=x.shape[-1],
        )


@register("rtn", bits=SUPPORTED_BITS, summary="round to nearest in groups of channels")
def build_rtn(
    bits: int,
    *,
    group_size: int = 32,
    axis: Literal["token", "channel"] = "token",
    symmetric: bool = False,
    zero_point: Literal["offset", "integer"] = "offset",
    scale_dtype: torch.dtype | None = None,
) -> tuple[Quantizer, Quantizer]:
    """Keys and values in the same format; the options are those of ``GroupFormat``."""
    quantizer = Groupwise(
        GroupFormat(
            bits,
            group_size,
            axis=axis,
            symmetric=symmetric,
            zero_point=zero_point,
            scale_dtype=scale_dtype,
        )
    )
    return quantizer, quantizer
