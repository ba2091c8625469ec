"""Batches of sequences of several lengths, padded on the left: a cache for each row.

Pads are never stored, so each row is packed as if it ran alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from videokv.cache import KVCache, Mass, Memory
from videokv.cache.mass import combined as combined_mass
from videokv.cache.memory import combined as combined_memory
from videokv.recipes import Recipe


def key_mask(attention_mask: Tensor, first: int, tokens: int) -> Tensor:
    """What the attention function gets: ``[B, 1, 1, tokens]``, whether a key is a real token.

    first: the position of the first key, which is beyond 0 in window layers.
    """
    return attention_mask[:, None, None, first : first + tokens].bool()


def is_key_mask(mask: Tensor, tokens: int) -> bool:
    """Whether a mask is one that ``key_mask`` made."""
    return mask.dtype == torch.bool and mask.shape[1:] == (1, 1, tokens)


class PaddedRows:
    """Stands in for the ``KVCache`` of a ``CompressedCache`` where rows are padded on the left.

    make: gives the cache of a row. Lengths and starts count pads, as the model does.
    """

    def __init__(self, make: Callable[[int], KVCache], batch: int) -> None:
        self.caches = [make(row) for row in range(batch)]
        self.pads = [0] * batch
        self.length = 0
        self._mask: Tensor | None = None

    @property
    def recipe(self) -> Recipe:
        chosen = self.caches[0].recipe
        assert isinstance(chosen, Recipe)
        return chosen

    def look(self, mask: Tensor, *, start: int) -> None:
        """Count the pads of each row of a forward that begins at token ``start``.

        Raises:
            ValueError: pads elsewhere than on the left, or tokens that were pads before and are no
                more.
        """
        if mask is self._mask:  # the same in all layers of a forward
            return
        seen = mask[:, 0, 0]
        if bool((seen[:, 1:] < seen[:, :-1]).any()):
            raise ValueError(
                "CompressedCache serves padding on the left: the attention mask has zeros after "
                "ones; set tokenizer.padding_side = 'left', or run each sequence alone"
            )
        pads = (~seen).sum(1).tolist()
        for row, (before, now) in enumerate(zip(self.pads, pads, strict=True)):
            if min(before, start) != min(now, start):
                raise ValueError(
                    f"row {row} had {before} pads, the attention mask now has {now} zeros: pass "
                    "the whole mask, of the tokens before too, in every forward"
                )
        self.pads, self._mask = pads, mask

    def attend(
        self, layer: int, start: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float
    ) -> Tensor:
        """Write the rows of a forward and attend; ``[B, Hq, M, Dv]``, zeros for pads."""
        batch, heads, tokens, _ = query.shape
        output = query.new_zeros(batch, heads, tokens, value.shape[3])
        for row, cache in enumerate(self.caches):
            first = min(max(self.pads[row] - start, 0), tokens)
            if first == tokens:
                continue
            q, k, v = (each[row : row + 1, :, first:] for each in (query, key, value))
            cache.write(layer, max(start - self.pads[row], 0), k, v, q)
            output[row : row + 1, :, first:] = cache.attend(layer, q, k, v, scale, causal=True)
        return output

    def commit(self, end: int) -> None:
        """Tokens up to ``end`` are final in every row."""
        for pads, cache in zip(self.pads, self.caches, strict=True):
            if end - pads > cache.length:
                cache.commit(end - pads)
        self.length = end

    def crop(self, length: int, *, decode_partial: bool = False) -> None:
        """Forget all but the first ``length`` tokens of every row."""
        for pads, cache in zip(self.pads, self.caches, strict=True):
            if cache.length > max(length - pads, 0):
                cache.crop(max(length - pads, 0), decode_partial=decode_partial)
        self.length, self._mask = min(self.length, length), None

    def select_batch(self, index: Tensor | Sequence[int]) -> None:
        """Refused: beams and selected rows would need caches that nobody counts."""
        raise ValueError(
            "rows of a padded batch cannot be repeated or reordered in a CompressedCache (beam "
            "search, num_return_sequences): run sequences of one length together, or each alone"
        )

    def memory(self) -> Memory:
        return combined_memory(cache.memory() for cache in self.caches)

    def mass(self) -> Mass:
        return combined_mass(cache.mass() for cache in self.caches)
