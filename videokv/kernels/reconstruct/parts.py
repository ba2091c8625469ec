"""What a packed chunk consists of, whatever method made it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from videokv.kernels.assign_centroids.layout import Clusters
from videokv.kernels.quantize_unbiased.layout import Centres
from videokv.rotation import Rotation
from videokv.tensors import E4M3, map_tensors

MAX_STAGES = 4
MAX_RANK = 64
MAX_HEAD_DIM = 256
STEP_DTYPES = (E4M3, torch.bfloat16, torch.float16, torch.float32, torch.uint8)

Zero = Literal["none", "offset", "integer", "packed", "centred"]


@dataclass(frozen=True, eq=False)
class LowRank:
    """codes int8 ``[B, H, N, r]`` times scales float16 ``[B, H, N, 1]`` times basis^T
    (bfloat16 ``[B, H, D, r]``) is added. places: the tokens of the N rows, None where N = T.
    """

    basis: Tensor
    codes: Tensor
    scales: Tensor
    places: Tensor | None = None

    def dense(self, tokens: int) -> LowRank:
        """The same with a row for every token (scale 0 for those without)."""
        if self.places is None:
            return self
        places = self.places.long()
        if self.places.dtype == torch.int16:
            places = places & 0xFFFF
        rows = places.unsqueeze(-1)
        shape = (*self.codes.shape[:2], tokens)
        codes = self.codes.new_zeros(*shape, self.codes.shape[3])
        scales = self.scales.new_zeros(*shape, 1)
        return LowRank(
            self.basis,
            codes.scatter_(2, rows.expand_as(self.codes), self.codes),
            scales.scatter_(2, rows, self.scales),
        )


@dataclass(frozen=True, eq=False)
class Parts:
    """One chunk ``[B, H, T, D]``.

    codes: packed uint8, ``[B, H, T, bytes]``, or ``[B, H, bytes]`` in a row where zero is packed.
    bits: of a code. axis, group_size: which elements share a step (``tensors.GroupFormat``).
    steps: ``[B, H, T, G]`` (axis token) or ``[B, H, groups, D]`` (channel); times scale
        ``[B, H, 1, 1]`` where there is one.
    zero: ``none``: codes are symmetric; ``offset``: zeros are added; ``integer``: zeros are the
        codes of zero, and the value itself where a step is 0; ``packed``: 2-bit codes of zero;
        ``centred``: codes are symmetric around (2^bits - 1) / 2.
    stages: centroids that are added. rotation: undone after that. centres: few centroids beside
        zero, added after that. low_rank: added last.
    log_steps: steps are logarithmic codes of ``quantize_unbiased``; centred zeros, centres, a
        rotation and log_steps come together.
    """

    codes: Tensor
    bits: int
    tokens: int
    head_dim: int
    group_size: int
    steps: Tensor
    axis: Literal["token", "channel"] = "token"
    scale: Tensor | None = None
    zero: Zero = "none"
    zeros: Tensor | None = None
    stages: tuple[Clusters, ...] = ()
    rotation: Rotation | None = None
    low_rank: LowRank | None = None
    centres: Centres | None = None
    log_steps: bool = False

    def __post_init__(self) -> None:
        together = {self.zero == "centred", self.centres is not None, self.log_steps}
        rotated = self.rotation is not None and self.scale is not None and not self.stages
        if len(together) > 1 or (self.log_steps and not rotated):
            raise ValueError(
                "centred zeros, centres, logarithmic steps with their scale and a rotation come "
                f"together and without stages, got zero={self.zero!r}, "
                f"centres={type(self.centres).__name__}, log_steps={self.log_steps}, "
                f"rotation={self.rotation}, {len(self.stages)} stages"
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, D)."""
        return (self.codes.shape[0], self.codes.shape[1], self.tokens, self.head_dim)

    def with_stages(self, stages: tuple[Clusters, ...]) -> Parts | None:
        """Centroids around these codes; None where something was added before."""
        if self.stages or self.rotation is not None or self.low_rank is not None:
            return None
        return replace(self, stages=stages)

    def with_rotation(self, rotation: Rotation) -> Parts | None:
        """A rotation around it; None where one is there, or a repair inside."""
        if self.rotation is not None or self.low_rank is not None:
            return None
        return replace(self, rotation=rotation)

    def with_low_rank(self, low_rank: LowRank) -> Parts | None:
        """A repair around it; None where there is one."""
        return None if self.low_rank is not None else replace(self, low_rank=low_rank)

    def kernel_refusal(self) -> str | None:
        """What of this the Triton kernel does not take, or None."""
        if self.head_dim > MAX_HEAD_DIM:
            return f"head size {self.head_dim} is above {MAX_HEAD_DIM}"
        if len(self.stages) > MAX_STAGES:
            return f"{len(self.stages)} stages are more than {MAX_STAGES}"
        if self.low_rank is not None and self.low_rank.codes.shape[3] > MAX_RANK:
            return f"rank {self.low_rank.codes.shape[3]} is above {MAX_RANK}"
        if self.zero == "packed" and (self.head_dim % 4 or self.bits != 2):
            return f"rows of {self.head_dim} codes of {self.bits} bits do not fill whole bytes"
        if self.steps.dtype not in STEP_DTYPES:
            return f"steps are {self.steps.dtype}"
        if self.shape[0] * self.shape[1] > 65535:
            return f"{self.shape[0]} x {self.shape[1]} heads are more than 65535"
        return None

    def config(self) -> tuple[Hashable, ...]:
        """What a kernel is compiled for."""
        return (
            self.bits,
            self.head_dim,
            self.group_size,
            self.axis,
            self.steps.dtype,
            None if self.scale is None else self.scale.dtype,
            self.zero,
            None if self.zeros is None else self.zeros.dtype,
            len(self.stages),
            self.rotation is not None,
            0 if self.low_rank is None else self.low_rank.codes.shape[3],
            0 if self.centres is None else self.centres.label_bits,
        )

    def corner(self, size: int) -> Parts:
        """The first ``size`` batch rows and heads."""
        take: Callable[[Tensor], Tensor] = lambda tensor: tensor[:size, :size]  # noqa: E731
        return map_tensors(self, take)
