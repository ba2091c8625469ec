"""QuantWM's repair (PSAC): what is left of a key's error where queries are large, kept in 8 bits.

    E = K - K^0,  U = top eigenvectors of M = mean of q q^T,  C = E U,  K^ = K^0 + C U^T

(2609.26425, Eq. 13-17). It wraps any quantizer of keys. The noise that stays is that of K^0
projected off U, so the correction must see projected queries; that of the plain query is 3 times
too large and nearly as bad as none, which is why it cannot be had here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from videokv.kernels.code_repair import MAX_RANK, RepairCodes, code_repair
from videokv.kernels.reconstruct import LowRank, Parts, fused, inner_parts
from videokv.kernels.subspace_iteration import Directions, operands, principal
from videokv.noise import ScoreNoise
from videokv.protocols import EncodeContext, Packed, Quantizer
from videokv.quantizers.inputs import check_count, checked

HALF_TOP = 65504.0
PLACE_LIMIT = 1 << 16  # token indices below it are stored in 16 bits


@dataclass(frozen=True, eq=False)
class Repair:
    """The low-rank part of a chunk.

    basis: bfloat16 ``[B, H, D, r]``; codes: int8 ``[B, H, N, r]``; scales: float16
    ``[B, H, N, 1]``, 0 for a row that is not repaired. Dense: N = T. Sparse: rows of the tokens
    ``places`` ``[B, H, N]`` (16 bits as int16, or int32), filled up with rows of scale 0.
    complete: whether every token of every head is repaired.
    """

    basis: Tensor
    codes: Tensor
    scales: Tensor
    places: Tensor | None
    complete: bool
    fields_by_data: ClassVar[tuple[str, ...]] = ("complete",)

    @property
    def format_by_data(self) -> bool:
        """Whether the layout follows from which rows were worth repairing."""
        return not self.complete

    def fields_apart(self, count: int) -> list[dict[str, object]] | None:
        """What ``count`` equal parts of the batch would have alone in ``fields_by_data``.

        None where one of them would not hold all rows, as here. Synchronises once.
        """
        if self.places is not None:
            return None
        kept = (self.scales > 0).unflatten(0, (count, -1)).flatten(1, 2)  # [count, B H, T, 1]
        rows = kept.sum((2, 3))
        tokens, rank = self.codes.shape[2:]
        found: list[dict[str, object]] = []
        for total, longest in torch.stack([rows.sum(1), rows.amax(1)], 1).tolist():
            if total == 0 or _worth_places(longest, tokens=tokens, rank=rank):
                return None
            found.append({"complete": total == rows.shape[1] * tokens})
        return found

    def coefficients(self, tokens: int) -> Tensor:
        """C as stored, float32 ``[B, H, T, r]``."""
        return self._spread(self.codes.float() * self.scales.float(), tokens)

    def kept(self, tokens: int) -> Tensor:
        """1 for repaired tokens, else 0: float32 ``[B, H, T, 1]``."""
        return self._spread((self.scales > 0).float(), tokens)

    def added_to(self, keys: Tensor) -> Tensor:
        """``keys`` ``[B, H, T, D]`` plus C U^T, float32."""
        batch, heads, tokens, size = keys.shape
        coefficients = self.coefficients(tokens).reshape(batch * heads, tokens, -1)
        basis = self.basis.float().reshape(batch * heads, size, -1)
        flat = keys.reshape(batch * heads, tokens, size)
        return torch.baddbmm(flat, coefficients, basis.mT).reshape(keys.shape)

    def _spread(self, rows: Tensor, tokens: int) -> Tensor:
        if self.places is None:
            return rows
        places = self.places.long()
        if self.places.dtype == torch.int16:
            places = places & (PLACE_LIMIT - 1)
        out = rows.new_zeros(*rows.shape[:2], tokens, rows.shape[3])
        # Only fillers share a place, and they add zeros: the order of additions is no matter.
        return out.scatter_add_(2, places[..., None].expand_as(rows), rows)


@dataclass(frozen=True, eq=False)
class SubspaceChunk:
    """Keys of the inner quantizer and their repair; None where no query was known yet.

    place: among the chunks that share a basis. From 1 on, it is the tensor of the chunk before.
    """

    inner: Packed
    repair: Repair | None
    place: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, D) of the tensor that was encoded."""
        return self.inner.shape

    def parts(self) -> Parts | None:
        """Those of ``inner`` with the repair, None where they do not go together."""
        inner = inner_parts(self.inner)
        if inner is None or self.repair is None:
            return inner
        repair = self.repair
        return inner.with_low_rank(
            LowRank(repair.basis, repair.codes, repair.scales, repair.places)
        )

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Reconstruct ``[B, H, T, D]``; the repair is added in float32."""
        done = fused(self, dtype)
        if done is not None:
            return done
        if self.repair is None:
            return self.inner.decode(dtype)
        keys = self.repair.added_to(self.inner.decode(torch.float32))
        if dtype == torch.float16:
            keys.clamp_(-HALF_TOP, HALF_TOP)  # the error may carry a key past the largest input
        return keys.to(dtype)

    def noise(self) -> tuple[ScoreNoise, ...]:
        """The inner noise seen by queries projected off the basis.

        Rows without repair keep the plain noise: a second term, only where there are such rows.
        The noise of the 8-bit coefficients is left out: below 1e-4 of the whole.
        """
        plain = self.inner.noise()
        if self.repair is None:
            return plain
        projected = tuple(
            replace(term, query_map=replace(term.query_map, basis=self.repair.basis))
            for term in plain
        )
        if self.repair.complete:
            return projected
        kept = self.repair.kept(self.shape[2])
        return (
            *(term.scaled(kept) for term in projected),
            *(term.scaled(1 - kept) for term in plain),
        )


@dataclass(frozen=True)
class Subspace:
    """Repairs the keys of ``inner`` in the ``rank`` directions where past queries are largest.

    basis_chunks: how many consecutive chunks share a basis, that of the queries before the first of
        them (16 r / N bits an element, once). Chunks with one basis share the columns of a
        correction: of a window of W chunks with G groups a head, about ``W G / basis_chunks``.
        Raise it where W G exceeds the 32 columns of one stock attention call (``sdpa`` otherwise
        makes several calls). Coefficients and gate are each chunk's own, with the queries known by
        then; an older basis may leave a few rows unrepaired, whose plain noise takes G columns
        once for all chunks.
    """

    inner: Quantizer
    rank: int = 8
    basis_chunks: int = 1

    def __post_init__(self) -> None:
        if self.rank == 0:
            raise ValueError("rank must be at least 1, got 0; use inner alone for 0")
        check_count("rank", self.rank)
        if isinstance(self.inner, Subspace):
            raise ValueError("a Subspace cannot repair another; raise its rank instead")
        check_count("basis_chunks", self.basis_chunks)

    @property
    def stackable(self) -> bool:
        """Whether ``inner`` treats batch rows by themselves."""
        return getattr(self.inner, "stackable", False)

    @property
    def period(self) -> int:
        """Chunks after which what they share begins anew."""
        return self.basis_chunks

    def check(self, head_dim: int) -> None:
        """Raise ValueError where the head has fewer channels than ``rank``."""
        if self.rank > head_dim:
            raise ValueError(f"rank {self.rank} is larger than head_dim {head_dim}")
        self.inner.check(head_dim)

    def encode(self, x: Tensor, context: EncodeContext) -> SubspaceChunk:
        """Pack ``[B, H, T, D]`` keys.

        Synchronises once more than the inner quantizer, where that does not code repairs itself.
        """
        x = checked(x)
        self.check(x.shape[-1])
        if context.role != "key":
            raise ValueError("Subspace repairs keys (queries score them); wrap the key quantizer")
        before = context.previous
        previous = before.inner if isinstance(before, SubspaceChunk) else before
        context = replace(context, previous=previous)
        moment = context.query_moment
        if moment is None:
            return SubspaceChunk(self.inner.encode(x, context), None)
        check_moment(moment, x)
        basis, place = self._shared_basis(before, x)
        known = principal(moment, rank=self.rank) if basis is None else operands(basis, moment)
        packed, found = self._encoded(x, context, known)
        return SubspaceChunk(packed, repair_of(found, known.basis), place)

    def _encoded(
        self, x: Tensor, context: EncodeContext, known: Directions
    ) -> tuple[Packed, RepairCodes]:
        inner: Any = self.inner
        if self.rank <= MAX_RANK and hasattr(inner, "encode_repaired"):
            found: tuple[Packed, RepairCodes] = inner.encode_repaired(x, context, known)
            return found
        packed = self.inner.encode(x, context)
        return packed, code_repair(x, packed.decode(torch.float32), known)

    def _shared_basis(self, before: Packed | None, x: Tensor) -> tuple[Tensor | None, int]:
        """The basis of the chunk before and the place after it, or (None, 0) for a new one.

        A chunk in which no row was worth repairing holds no basis: the next one finds its own.
        """
        if not isinstance(before, SubspaceChunk) or before.repair is None:
            return None, 0
        basis, place = before.repair.basis, before.place + 1
        fits = tuple(basis.shape) == (*x.shape[:2], x.shape[3], self.rank)
        return (basis, place) if fits and place < self.basis_chunks else (None, 0)


def check_moment(moment: Tensor, x: Tensor) -> None:
    """Raise ValueError where ``moment`` is not ``[B, H, D, D]`` of the keys ``x``."""
    expected = (*x.shape[:2], x.shape[3], x.shape[3])
    if tuple(moment.shape) != expected:
        raise ValueError(
            f"query_moment must be [B, Hkv, D, D] {expected} for keys {tuple(x.shape)}, "
            f"got {tuple(moment.shape)}"
        )


def repair_of(found: RepairCodes, basis: Tensor) -> Repair | None:
    """The rows that a repair helps, in the smaller layout; None if it helps none.

    basis: bfloat16 ``[B, H, D, r]``.
    """
    total = sum(found.kept)
    if total == 0:
        return None
    batch, heads, tokens, _ = found.codes.shape
    complete = total == batch * heads * tokens
    dense = Repair(basis, found.codes, found.scales, None, complete=complete)
    return _sparse_if_smaller(dense, max(found.kept))


def _sparse_if_smaller(dense: Repair, longest: int) -> Repair:
    """Rows of repaired tokens only, where they and their indices take fewer bytes."""
    tokens, rank = dense.codes.shape[2:]
    if not _worth_places(longest, tokens=tokens, rank=rank):
        return dense
    kept = dense.scales[..., 0] > 0
    # Kept tokens first, in their order; a head with fewer is filled up with rows of scale 0.
    places = torch.sort(kept.byte(), dim=-1, descending=True, stable=True).indices[..., :longest]
    rows = places.unsqueeze(-1)
    return Repair(
        basis=dense.basis,
        codes=dense.codes.gather(2, rows.expand(-1, -1, -1, rank)),
        scales=dense.scales.gather(2, rows),
        places=places.to(_place_type(tokens)),
        complete=False,
    )


def _place_type(tokens: int) -> torch.dtype:
    return torch.int16 if tokens <= PLACE_LIMIT else torch.int32


def _worth_places(longest: int, *, tokens: int, rank: int) -> bool:
    """Whether ``longest`` rows of a head with their places take fewer bytes than all rows."""
    row_bytes = rank + 2
    return longest * (row_bytes + _place_type(tokens).itemsize) < tokens * row_bytes
