"""Which token lives in which row of a model's cache buffer.

A buffer's rows are described by pieces in row order. Moving rows re-labels pieces; no key or
value is touched, so rolling a window packs nothing again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from videokv.noise import ScoreNoise

Pieces = tuple["Piece", ...]


@dataclass(frozen=True, eq=False)
class Piece:
    """``count`` consecutive rows: cached tokens, dense rows, or rows that were never written.

    token: position of the first row in the cache, or None.
    dense: ``[B, count, H, D]`` rows that the cache does not hold, or None.
    noise: of dense rows that were decoded from the cache and then rotated (see ``rotary.py``).
    exact: the same rows without noise, where the cache records them (``verify.py``).
    """

    count: int
    token: int | None = None
    dense: Tensor | None = None
    noise: tuple[ScoreNoise, ...] = ()
    exact: Tensor | None = None

    @property
    def empty(self) -> bool:
        return self.token is None and self.dense is None

    def part(self, first: int, last: int) -> Piece:
        """Rows first..last of it."""
        if (first, last) == (0, self.count):
            return self
        noise = tuple(
            term
            if term.weights.shape[2] == 1
            else replace(term, weights=term.weights[:, :, first:last])
            for term in self.noise
        )
        return Piece(
            last - first,
            None if self.token is None else self.token + first,
            None if self.dense is None else self.dense[:, first:last],
            noise,
            None if self.exact is None else self.exact[:, first:last],
        )

    def without_noise(self) -> Piece:
        """The same rows as they were written."""
        return self if self.exact is None else Piece(self.count, dense=self.exact)

    def follows(self, before: Piece) -> bool:
        """Whether both are one run of cached tokens, or of unwritten rows."""
        if before.token is not None and self.token is not None:
            return before.token + before.count == self.token
        return before.empty and self.empty


def joined(pieces: Iterable[Piece]) -> Pieces:
    """The same rows in as few pieces as possible."""
    out: list[Piece] = []
    for piece in pieces:
        if not piece.count:
            continue
        if out and piece.follows(out[-1]):
            out[-1] = Piece(out[-1].count + piece.count, out[-1].token)
        else:
            out.append(piece)
    return tuple(out)


def length(pieces: Pieces) -> int:
    """Rows in all."""
    return sum(piece.count for piece in pieces)


def cut(pieces: Pieces, first: int, last: int) -> Pieces:
    """Rows first..last."""
    found, at = [], 0
    for piece in pieces:
        low, high = max(first, at), min(last, at + piece.count)
        if low < high:
            found.append(piece.part(low - at, high - at))
        at += piece.count
    return joined(found)


def laid_over(pieces: Pieces, first: int, fresh: Pieces) -> Pieces:
    """``fresh`` in place of the rows from ``first`` on; the number of rows stays."""
    end = first + length(fresh)
    return joined([*cut(pieces, 0, first), *fresh, *cut(pieces, end, length(pieces))])


def ranges(pieces: Pieces) -> list[tuple[int, int]]:
    """(start, end) of the cached tokens, in row order."""
    return [(p.token, p.token + p.count) for p in pieces if p.token is not None]


def holds(pieces: Pieces, token: int) -> bool:
    """Whether some row holds that token."""
    return any(first <= token < last for first, last in ranges(pieces))


def paired(keys: Pieces, values: Pieces) -> list[tuple[Piece, Piece]]:
    """Pieces of as many key as value rows, cut so that both sides break at the same rows."""
    ends = sorted(_ends(keys) | _ends(values))
    pairs, first = [], 0
    for end in ends:
        (key,), (value,) = cut(keys, first, end), cut(values, first, end)
        pairs.append((key, value))
        first = end
    return pairs


def _ends(pieces: Pieces) -> set[int]:
    at, found = 0, set()
    for piece in pieces:
        at += piece.count
        found.add(at)
    return found
