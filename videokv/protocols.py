"""READ FIRST: the contracts between rooms, and the legend of shapes.

    B    batch                 Hq   query heads (a multiple of Hkv)
    Hkv  key/value heads       D    key head size, Dv value head size
    T    tokens of a chunk     M    queries
    F    columns of a correction (one per group of channels, a few at most)

One layout everywhere: ``[B, H, T, D]``. Adapters transpose at the edge.

Write: ``cache.write(layer, start, keys, values, queries)``, over the same rows at every denoising
step; ``cache.commit(end)`` makes the chunk final: ``Quantizer.encode`` packs it, the dense rows go.
Read: ``attend(query, segments, scale=...)``: segments are the chunks in order, then the current.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from videokv.noise import ScoreNoise

Role = Literal["key", "value"]
NARROW_BACKEND = "triton-fp8"  # the one backend that reads values (or keys too) in E4M3


@dataclass(frozen=True)
class EncodeContext:
    """What a quantizer may know when it encodes a chunk: only the past (it is causal).

    layer, role: where the tensor comes from.
    seed: of the recipe; a quantizer that draws random numbers makes its own generator from it.
    query_moment: ``[B, Hkv, D, D]`` float32, mean of q q^T over the queries of earlier chunks (the
        query heads of one KV head pooled), None before the first one (cold start).
    query_count: number of queries in that mean.
    previous: the packed chunk before this one of the same layer and role, or None.
    """

    layer: int
    role: Role
    seed: int = 0
    query_moment: Tensor | None = None
    query_count: int = 0
    previous: Packed | None = None


@runtime_checkable
class Packed(Protocol):
    """A frozen chunk of keys or values: a frozen dataclass whose tensors are all it holds."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, D) of the tensor that was encoded."""
        ...

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Reconstruct ``[B, H, T, D]`` in the basis in which it was given (rotations undone)."""
        ...

    def noise(self) -> tuple[ScoreNoise, ...]:
        """The noise of its steps (plain Taylor weights, Delta^2); () if it has none."""
        ...


class Quantizer(Protocol):
    """One method. Instances are immutable and hold options only; state lives in the chunks.

    One that never looks at ``EncodeContext.query_moment`` may say so by an attribute
    ``reads_queries = False``; the moment is then not kept for its sake. ``reads_previous = False``
    says the same of the tensors of ``EncodeContext.previous``, which are one layer's where several
    are encoded together. ``stackable = True``: batch rows are treated as if each were alone, and
    the chunk's tensors have the batch first, so that layers may be encoded together as rows of one
    batch; a chunk (or a part of it) whose format the numbers of all rows have set says so by a true
    ``format_by_data`` (and what parts of the batch would have alone by ``fields_apart``, where only
    plain ``fields_by_data`` differ).
    """

    def check(self, head_dim: int) -> None:
        """Raise ValueError naming the option where heads of this size cannot be encoded."""
        ...

    def encode(self, x: Tensor, context: EncodeContext) -> Packed:
        """Pack ``[B, H, T, D]`` (float32, bfloat16 or float16, finite, T >= 1)."""
        ...


class Correction(Protocol):
    """What is subtracted from cached scores. ``name`` is the word after ``+`` in a recipe.

    ``reads_queries = False``, ``stackable = True``: of ``fit``, as ``Quantizer`` says them.
    ``blank_terms = True``: terms without any weight change nothing in what ``fit`` gives.
    """

    name: str

    def fit(
        self, packed: Packed, keys: Tensor, queries: Tensor | None, *, scale: float
    ) -> Tensor | None:
        """Numbers to store with a chunk when it is committed, or None.

        keys: the true ``[B, Hkv, T, D]``. queries: sampled rows ``[B, Hq, M, D]`` of the commit
        pass, in the coordinates of the keys, or None where the model gave none.
        """
        ...

    def noise(self, packed: Packed, factors: Tensor | None) -> tuple[ScoreNoise, ...]:
        """The terms to subtract, from the stored steps and the stored numbers."""
        ...


@dataclass(frozen=True)
class Segment:
    """Dense keys and values of consecutive tokens, with the noise that keys carry.

    keys ``[B, Hkv, T, D]``, values ``[B, Hkv, T, Dv]``; noise is () for exact keys: sink, recent
    and current chunks, whose scores no correction may touch. spare: elements in memory right after
    the channels of each key that belong to nobody: a backend may write there. key_scale,
    value_scale: float32 ``[B, Hkv]`` that keys and values in E4M3 are multiplied by; None for what
    is in the query's dtype. packed: whether the rows were reconstructed from codes: only without
    any such rows attention must be, bit for bit, what the model computes without a cache.
    """

    keys: Tensor
    values: Tensor
    noise: tuple[ScoreNoise, ...] = ()
    spare: int = 0
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    packed: bool = False

    @property
    def narrow(self) -> bool:
        """Whether keys or values are E4M3 with a scale."""
        return self.key_scale is not None or self.value_scale is not None


class AttentionBackend(Protocol):
    """softmax(scale q k^T - b) v over all segments at once."""

    name: str

    def refusal(self, query: Tensor, segments: Sequence[Segment]) -> str | None:
        """Why this backend cannot serve the call (naming the option), or None if it can."""
        ...

    def attend(
        self,
        query: Tensor,
        segments: Sequence[Segment],
        *,
        scale: float,
        causal: bool = False,
        need_lse: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Output ``[B, Hq, M, Dv]`` in the query's dtype, and the natural-log log-sum-exp of the
        corrected scores ``[B, Hq, M]`` in float32 (None if not needed).

        causal: the last segment holds the queries' own tokens (M of them); query m sees all
        earlier segments and the rows <= m of the last.
        """
        ...
