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

import torch
from torch import Tensor

from videokv.kernels.assign_centroids import gather_centroids, label_means, nearest, spread_tokens
from videokv.kernels.pack_codes import pack, unpack
from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import EncodeContext, Quantizer
from videokv.quantizers import register
from videokv.quantizers.inputs import checked
from videokv.rotation import Rotation
from videokv.tensors import E4M3, E4M3_MAX, require_finite

LARGEST = 1e15  # squares of larger numbers, summed, come near the end of float32
STEPS_AN_OCTAVE = 20
NO_STEP = 255  # the code of a group that is all zero
TRIED = (0.75, 0.9, 1.05, 1.2, 1.4)  # steps tried, in units of the best for Gaussian numbers
GAUSSIAN_STEP = {2: 0.9957, 3: 0.586, 4: 0.3352}
LONG_CHUNK = 1024  # tokens from which 15 centroids cost next to nothing


@dataclass(frozen=True, eq=False)
class Centres:
    """Centroids of a chunk and the one of each token; label 0 is zero.

    ids: packed labels, uint8 ``[B, H, bytes]``; table: E4M3 ``[B, H, K, D]`` for labels 1..K;
    scale: float32 ``[B, H, 1, 1]``, what the table is multiplied by.
    """

    ids: Tensor
    table: Tensor
    scale: Tensor
    label_bits: int
    tokens: int

    def gather(self) -> Tensor:
        """The centroid of each token, float32 ``[B, H, T, D]``."""
        labels = unpack(self.ids, bits=self.label_bits, count=self.tokens)
        return gather_centroids(_with_zero(self.table.float() * self.scale), labels)


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
        return _real_steps(self.steps, self.scale)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Reconstruct ``[B, H, T, D]``; the arithmetic is float32."""
        codes = unpack(self.packed, bits=self.bits, count=self.rotation.head_dim).float()
        codes.sub_(((1 << self.bits) - 1) / 2)
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
    label_bits: 2, 3 or 4 for 3, 7 or 15 centroids beside zero; from 1,024 tokens on at least 4.
    iterations: of k-means, a fixed number.
    """

    bits: int
    group_size: int | None = None
    label_bits: int = 2
    iterations: int = 3

    def __post_init__(self) -> None:
        if self.bits not in GAUSSIAN_STEP:
            raise ValueError(f"bits must be one of {tuple(GAUSSIAN_STEP)}, got {self.bits!r}")
        if self.label_bits not in (2, 3, 4):
            raise ValueError(f"label_bits must be 2, 3 or 4, got {self.label_bits!r}")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size must be positive or None, got {self.group_size!r}")
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations!r}")

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
        x = checked(x).float()
        self.check(x.shape[-1])
        _require_usable(x, context)
        label_bits = self.label_bits if x.shape[2] < LONG_CHUNK else 4
        centres = fit_centres(x, bits=label_bits, iterations=self.iterations, seed=context.seed)
        rotation = Rotation(x.shape[-1], context.seed)
        rotated = rotation.apply(x - centres.gather())
        groups = rotated.unflatten(-1, (-1, self.group_size or _largest_group(x.shape[-1])))
        codes, ideal = unbiased_codes(groups, bits=self.bits)
        steps, scale = _coded_steps(ideal)
        return UnbiasedChunk(
            packed=pack(codes.flatten(-2), bits=self.bits),
            steps=steps,
            scale=scale,
            centres=centres,
            rotation=rotation,
            bits=self.bits,
        )


def fit_centres(x: Tensor, *, bits: int, iterations: int, seed: int) -> Centres:
    """k-means of float32 ``[B, H, T, D]`` with ``2^bits - 1`` centroids beside a fixed zero."""
    table = _with_zero(spread_tokens(x, count=(1 << bits) - 1, seed=seed))
    for _ in range(iterations):
        labels = nearest(x, table)[..., 0].to(torch.uint8)
        table = _with_zero(label_means(x, labels, fallback=table)[:, :, 1:])
    largest = table.abs().amax((2, 3), keepdim=True)
    scale = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    stored = (table[:, :, 1:] / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    labels = nearest(x, _with_zero(stored.float() * scale))[..., 0].to(torch.uint8)
    return Centres(pack(labels, bits=bits), stored, scale, bits, x.shape[2])


def unbiased_codes(groups: Tensor, *, bits: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 ``[..., g]`` and steps ``[...]`` of float32 groups; step 0 where all are zero.

    Among the tried grids the one with the largest (y.c)^2 / c.c wins: the smallest error once its
    step is y.y / (y.c).
    """
    half = ((1 << bits) - 1) / 2
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


def _coded_steps(ideal: Tensor) -> tuple[Tensor, Tensor]:
    scale = ideal.amax((2, 3), keepdim=True)
    down = torch.where(ideal > 0, torch.log2(scale / ideal), torch.inf)
    codes = (down * STEPS_AN_OCTAVE).round_().clamp_(0, NO_STEP)
    return codes.to(torch.uint8), scale


def _real_steps(codes: Tensor, scale: Tensor) -> Tensor:
    steps = torch.exp2(codes.float() / -STEPS_AN_OCTAVE) * scale
    return torch.where(codes == NO_STEP, 0.0, steps)


def _with_zero(table: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(table[:, :, :1]), table], 2)


def _largest_group(head_dim: int) -> int:
    return next(size for size in range(min(head_dim, 128), 0, -1) if head_dim % size == 0)


def _require_usable(x: Tensor, context: EncodeContext) -> None:
    largest = float(x.abs().amax())
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
    """2.6 to 2.7 bits: keys 3, values 2; meant to be used with the correction ``calibrated``."""
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
    """2.1 to 2.3 bits: keys and values 2, more centroids."""
    quantizer = Unbiased(2, group_size, label_bits)
    return quantizer, quantizer
