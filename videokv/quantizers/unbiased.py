"""videokv's own quantizer: few centroids and zero, a rotation, codes that are unbiased.

    x^ = mu[z] + H^T (Delta c),     c = code - (L - 1) / 2,     L = 2^bits,     Delta = y.y / (y.c)

y is a group of H (x - mu[z]). Four choices, all for scores that a softmax will exponentiate:

* ``Delta`` makes the reconstruction's projection on y equal y. Steps of least squared error shrink
  y instead (by 12 % at 2 bits), which flattens the softmax: no correction per token undoes that.
* The grid has no zero point: rotated residuals are symmetric, and one byte a group is enough for
  the step (logarithmic, 3.5 % apart), where round-to-nearest pays 24 bits.
* Centroids are few (3, 7 or 15) and take most of what is common to a chunk's tokens.
* Zero is always one of the centroids: attention sinks lie near zero, far from all other tokens;
  measured against a mean their error is large, and everybody looks at them.

Keys get more bits than values: their errors pass through the exponential.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from videokv.kernels.assign_centroids import few_centres
from videokv.kernels.pack_codes import unpack
from videokv.kernels.quantize_unbiased import (
    LABEL_BITS,
    Centres,
    half_range,
    largest_group,
    quantize_unbiased,
    real_steps,
    unbiased_codes,
)
from videokv.kernels.quantize_unbiased.layout import GAUSSIAN_STEP
from videokv.kernels.reconstruct import Parts, fused
from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import EncodeContext, Quantizer
from videokv.quantizers import register
from videokv.quantizers.inputs import check_count, checked
from videokv.rotation import Rotation
from videokv.tensors import require_finite

__all__ = ["LONG_CHUNK", "Centres", "Unbiased", "UnbiasedChunk", "fit_centres", "unbiased_codes"]

LARGEST = 1e15  # squares of larger numbers, summed, come near the end of float32
# From so many tokens and elements a head on 15 centroids and their labels fit into 2.75 bits. With
# few channels a label costs more: at 1,024 x 64 the whole would take 2.81.
LONG_CHUNK = 1024
LONG_CHUNK_ELEMENTS = 1024 * 128


@dataclass(frozen=True, eq=False)
class UnbiasedChunk:
    """A chunk ``[B, H, T, D]``.

    packed: uint8 ``[B, H, T, bytes]``; steps: uint8 ``[B, H, T, G]``, Delta = scale 2^(-c/20), 255:
    none; scale: float32 ``[B, H, 1, 1]``, the largest step.
    """

    packed: Tensor
    steps: Tensor
    scale: Tensor
    centres: Centres
    rotation: Rotation
    bits: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, D) of the tensor that was encoded."""
        batch, heads, tokens, _ = self.steps.shape
        return batch, heads, tokens, self.rotation.head_dim

    def real_steps(self) -> Tensor:
        """Delta, float32 ``[B, H, T, G]``."""
        return real_steps(self.steps, self.scale)

    def parts(self) -> Parts:
        """What the kernels read."""
        size = self.rotation.head_dim
        return Parts(
            codes=self.packed,
            bits=self.bits,
            tokens=self.steps.shape[2],
            head_dim=size,
            group_size=size // self.steps.shape[3],
            steps=self.steps,
            scale=self.scale,
            zero="centred",
            rotation=self.rotation,
            centres=self.centres,
            log_steps=True,
        )

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Reconstruct ``[B, H, T, D]``; the arithmetic is float32."""
        done = fused(self, dtype)
        if done is not None:
            return done
        codes = unpack(self.packed, bits=self.bits, count=self.rotation.head_dim).float()
        codes.sub_(half_range(self.bits))
        groups = codes.unflatten(-1, (self.steps.shape[3], -1))
        rotated = groups.mul_(self.real_steps().unsqueeze(-1)).flatten(-2)
        x = self.rotation.invert(rotated).add_(self.centres.gather())
        if dtype == torch.float16:
            x.clamp_(-65504.0, 65504.0)  # the error may carry a value past the largest input
        return x.to(dtype)

    def noise(self) -> tuple[ScoreNoise, ...]:
        """Delta^2, one feature a group of rotated channels."""
        group_size = self.rotation.head_dim // self.steps.shape[3]
        squares = self.real_steps().square()
        return (ScoreNoise(squares, QueryMap(group_size, self.rotation)),)


@dataclass(frozen=True)
class Unbiased:
    """Centroids, rotation and unbiased codes of ``bits`` bits.

    group_size: channels that share a step; None: the whole head, or its largest divisor up to 128.
    label_bits: 2, 3 or 4 for 3, 7 or 15 centroids beside zero; 4 in chunks of at least 1,024
        tokens and 1,024 x 128 elements a head.
    iterations: of k-means, a fixed number.
    """

    bits: int
    group_size: int | None = None
    label_bits: int = 2
    iterations: int = 3
    reads_queries: ClassVar[bool] = False
    reads_previous: ClassVar[bool] = False
    stackable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or self.bits not in GAUSSIAN_STEP:
            raise ValueError(f"bits must be one of {tuple(GAUSSIAN_STEP)}, got {self.bits!r}")
        if not isinstance(self.label_bits, int) or self.label_bits not in LABEL_BITS:
            raise ValueError(f"label_bits must be 2, 3 or 4, got {self.label_bits!r}")
        if self.group_size is not None:
            check_count("group_size", self.group_size)
        check_count("iterations", self.iterations)

    def check(self, head_dim: int) -> None:
        """Raise ValueError where ``group_size`` does not divide the head."""
        if self.group_size is not None and head_dim % self.group_size:
            raise ValueError(
                f"group_size {self.group_size} does not divide head_dim {head_dim}; leave it out "
                "for the largest that does"
            )

    def encode(self, x: Tensor, context: EncodeContext) -> UnbiasedChunk:
        """Pack ``[B, H, T, D]``; ValueError names the layer where it is not finite.

        Synchronises once.
        """
        x = checked(x)
        tokens, size = x.shape[2:]
        self.check(size)
        if x.device.type == "cpu":  # nothing to wait for: look before clustering what is not finite
            _require_usable(x, x.abs().amax(), context)
        long = tokens >= LONG_CHUNK and tokens * size >= LONG_CHUNK_ELEMENTS
        label_bits = 4 if long else self.label_bits
        centres = fit_centres(x, bits=label_bits, iterations=self.iterations, seed=context.seed)
        rotation = Rotation(size, context.seed)
        codes = quantize_unbiased(
            x,
            bits=self.bits,
            group_size=self.group_size or largest_group(size),
            centres=centres,
            rotation=rotation,
        )
        if x.device.type != "cpu":
            _require_usable(x, codes.largest.amax(), context)
        return UnbiasedChunk(
            packed=codes.packed,
            steps=codes.steps,
            scale=codes.scale,
            centres=centres,
            rotation=rotation,
            bits=self.bits,
        )


def fit_centres(x: Tensor, *, bits: int, iterations: int, seed: int) -> Centres:
    """k-means of ``[B, H, T, D]`` with ``2^bits - 1`` centroids beside a fixed zero."""
    ids, table, scale = few_centres(x, bits=bits, iterations=iterations, seed=seed)
    return Centres(ids, table, scale, bits, x.shape[2])


def _require_usable(x: Tensor, largest_value: Tensor, context: EncodeContext) -> None:
    largest = float(largest_value)
    if largest < LARGEST:
        return
    require_finite(x, what=f"{context.role}s", layer=context.layer)
    raise ValueError(
        f"{context.role}s of layer {context.layer} reach {largest:.3g}; values beyond "
        f"{LARGEST:.0e} cannot be encoded: check the model's dtype and its inputs"
    )


@register("videokv", bits=(2,), summary="ours: centroids, rotation, unbiased codes; keys 3 bits")
def build_videokv(
    bits: int,
    *,
    key_bits: int = 3,
    value_bits: int = 2,
    group_size: int | None = None,
    label_bits: int = 2,
) -> tuple[Quantizer, Quantizer]:
    """2.6 to 2.75 bits: keys 3, values 2; meant to be used with the correction ``calibrated``.

    Short chunks pay more for their centroids (256 x 64: 2.754, 100 x 64: 2.91), and heads of fewer
    than 64 channels for steps and labels (324 x 40: 2.83).
    """
    if bits != 2:
        raise ValueError(f"videokv comes in 2 bits, got bits={bits!r}")
    return (
        Unbiased(key_bits, group_size, label_bits),
        Unbiased(value_bits, group_size, label_bits),
    )


@register("videokv-2bit-small", bits=(), summary="ours at 2.1 to 2.3 bits: keys and values 2")
def build_videokv_small(
    *, group_size: int | None = None, label_bits: int = 3
) -> tuple[Quantizer, Quantizer]:
    """2.1 to 2.35 bits: keys and values 2, more centroids (256 x 64: 2.395, 324 x 40: 2.45)."""
    quantizer = Unbiased(2, group_size, label_bits)
    return quantizer, quantizer
