"""QuaRot: rotate each token by a random Hadamard matrix, then quantize with any quantizer.

(H q) . (H k) = q . k, and outlier channels of k are spread over its groups before they set a step.
One rotation, drawn from the recipe's seed, serves all layers and chunks, so that chunks share the
columns of a correction. Keys must be cached after RoPE, or decoded before it is applied.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from videokv.kernels.quantize_groups import require_chunk
from videokv.kernels.reconstruct import Parts, fused, inner_parts
from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import EncodeContext, Packed, Quantizer
from videokv.quantizers import register
from videokv.quantizers.groupwise import Groupwise
from videokv.quantizers.inputs import check_flag
from videokv.rotation import Rotation
from videokv.tensors import SUPPORTED_BITS, GroupFormat


@dataclass(frozen=True, eq=False)
class RotatedChunk:
    """A chunk ``[B, H, T, D]`` whose rotated tokens are held by ``inner``."""

    inner: Packed
    rotation: Rotation

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, D)."""
        return self.inner.shape

    def parts(self) -> Parts | None:
        """Those of ``inner`` with the rotation, None where they do not go together."""
        inner = inner_parts(self.inner)
        return None if inner is None else inner.with_rotation(self.rotation)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Reconstruct ``[B, H, T, D]`` in the basis in which it was given."""
        done = fused(self, dtype)
        if done is not None:
            return done
        values = self.rotation.invert(self.inner.decode(torch.float32))
        if dtype == torch.float16:
            values.clamp_(-65504.0, 65504.0)  # the error may carry a value past the largest input
        return values.to(dtype)

    def noise(self) -> tuple[ScoreNoise, ...]:
        """The noise of ``inner``, met by rotated queries."""
        return tuple(
            dataclasses.replace(term, query_map=_rotated(term.query_map, self.rotation))
            for term in self.inner.noise()
        )


def _rotated(query_map: QueryMap, rotation: Rotation) -> QueryMap:
    # A QueryMap projects first and rotates last; noise found inside a rotation would need the
    # opposite order, or two rotations.
    if query_map.transform is not None or query_map.basis is not None:
        raise ValueError(
            "a rotation cannot wrap a quantizer whose noise has a rotation or a basis of its own; "
            "wrap the rotation in the subspace instead (project, then rotate)"
        )
    return dataclasses.replace(query_map, transform=rotation)


@dataclass(frozen=True)
class Rotated:
    """Encode H x with ``inner``; H is drawn from the seed of the recipe."""

    inner: Quantizer

    def __post_init__(self) -> None:
        if isinstance(self.inner, Rotated):
            raise ValueError("Rotated(Rotated(...)): one rotation is enough; unwrap the inner one")

    @property
    def reads_queries(self) -> bool:
        """Whether ``inner`` looks at past queries (so does a quantizer that does not say)."""
        return getattr(self.inner, "reads_queries", True)

    @property
    def reads_previous(self) -> bool:
        """Whether ``inner`` looks at the chunk before."""
        return getattr(self.inner, "reads_previous", True)

    @property
    def stackable(self) -> bool:
        """Whether ``inner`` treats batch rows by themselves."""
        return getattr(self.inner, "stackable", False)

    def check(self, head_dim: int) -> None:
        """Raise ValueError where the inner quantizer does; rotations exist for any head size."""
        self.inner.check(head_dim)

    def encode(self, x: Tensor, context: EncodeContext) -> RotatedChunk:
        """Pack ``[B, H, T, D]``; what is known of queries and of the past is rotated along."""
        require_chunk(x)
        self.check(x.shape[-1])
        rotation = Rotation(x.shape[-1], context.seed)
        if isinstance(self.inner, Groupwise):  # one kernel rotates and quantizes
            _previous(context, rotation)  # it looks neither at that nor at queries
            return RotatedChunk(self.inner.encode(x, context, rotation=rotation), rotation)
        rotated = rotation.apply(x.detach().to(torch.float32))
        return RotatedChunk(self.inner.encode(rotated, _inside(context, rotation)), rotation)


def _inside(context: EncodeContext, rotation: Rotation) -> EncodeContext:
    """The context in rotated coordinates: H M H^T, and the chunk inside the previous one."""
    moment = context.query_moment
    if moment is not None:
        moment = rotation.apply(rotation.apply(moment).transpose(-1, -2)).transpose(-1, -2)
    previous = _previous(context, rotation)
    return dataclasses.replace(context, query_moment=moment, previous=previous)


def _previous(context: EncodeContext, rotation: Rotation) -> Packed | None:
    """The chunk inside the previous one; ValueError where that was rotated otherwise."""
    previous = context.previous
    if previous is None:
        return None
    if not isinstance(previous, RotatedChunk) or previous.rotation != rotation:
        raise ValueError(
            f"the previous chunk of layer {context.layer} ({context.role}) was not packed with "
            f"{rotation}; start a new cache to change the recipe or its seed"
        )
    return previous.inner


@register("quarot", bits=SUPPORTED_BITS, summary="Hadamard-rotated keys, round to nearest")
def build_quarot(
    bits: int,
    *,
    group_size: int = 32,
    symmetric: bool = False,
    zero_point: Literal["offset", "integer"] = "offset",
    scale_dtype: torch.dtype | None = None,
    rotate_v: bool = False,
) -> tuple[Quantizer, Quantizer]:
    """Rotated keys; values plain, or rotated too with ``rotate_v``. Groups along the channels."""
    check_flag("rotate_v", rotate_v)
    plain = Groupwise(
        GroupFormat(
            bits,
            group_size,
            symmetric=symmetric,
            zero_point=zero_point,
            scale_dtype=scale_dtype,
        )
    )
    keys = Rotated(plain)
    return keys, keys if rotate_v else plain
