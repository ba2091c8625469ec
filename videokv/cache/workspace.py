"""The transient dense copies of packed chunks, bounded by a budget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from videokv.cache.policy import is_count
from videokv.protocols import Segment

Decoders = dict[int, Callable[[], Segment]]


def segment_bytes(segment: Segment) -> int:
    """Bytes of a decoded chunk: keys, values and the weights of its noise."""
    keys, values = segment.keys, segment.values
    found = keys.nbytes + values.nbytes
    if segment.spare:
        found += segment.spare * keys.nbytes // keys.shape[3]
    for term in segment.noise:
        found += term.weights.nbytes
    return found


class Workspace:
    """Keeps decoded chunks between calls where the budget allows it for every layer.

    budget_bytes: None keeps nothing: one layer's decoded keys and values live while it attends.
        Otherwise, as long as the packed history of all layers fits when decoded, each chunk is
        decoded once and reused until it is dropped. Where it does not fit, nothing is kept; where
        not even one layer fits, the layer comes in several blocks.
    peak_bytes: the most that was alive at once, noise weights and the copies of layers that are
        packed together included. What an attention kernel copies of its inputs is not in it.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        if budget_bytes is not None and (not is_count(budget_bytes) or budget_bytes < 1):
            raise ValueError(
                f"workspace_bytes must be None or a positive integer, got {budget_bytes!r}"
            )
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        self.kept: dict[tuple[int, int], Segment] = {}
        self._noise_bytes: dict[int, int] = {}

    def blocks(
        self, layer: int, decoders: Decoders, *, layers: int
    ) -> Iterator[tuple[dict[int, Segment], bool]]:
        """(decoded chunks by ordinal, is it the last block), in order; at least one block.

        A block is emptied when the next one is asked for, so that one is alive at a time.
        """
        if all((layer, ordinal) in self.kept for ordinal in decoders):
            yield {ordinal: self.kept[layer, ordinal] for ordinal in decoders}, True
            return
        self._make_room(layers * len(decoders))
        block: dict[int, Segment] = {}
        size = largest = 0
        whole = True
        for ordinal, decode in decoders.items():
            if block and self._overflows(layer, size + largest):
                whole = False
                self._note(layer, size)
                yield block, False
                block.clear()
                size = 0
            block[ordinal] = self.kept.get((layer, ordinal)) or decode()
            chunk_bytes = segment_bytes(block[ordinal])
            self._refuse_larger(layer, chunk_bytes)
            size, largest = size + chunk_bytes, max(largest, chunk_bytes)
        self._note(layer, size)
        if whole:
            self._keep(layer, block, size, layers=layers)
        yield block, True

    def once(self, layer: int, decoders: Decoders) -> dict[int, Segment]:
        """Decoded chunks for a caller who holds them; nothing more is kept."""
        used = {
            ordinal: self.kept.get((layer, ordinal)) or decode()
            for ordinal, decode in decoders.items()
        }
        self._note(layer, sum(segment_bytes(segment) for segment in used.values()))
        return used

    def note_rows(
        self, layer: int, segments: Iterable[Segment], *, noise_bytes: int | None = None
    ) -> None:
        """Count cached rows that were gathered for one call.

        noise_bytes: of the noise that the layer keeps from now on, which counts during calls of
            other layers too (here its weights are those of the segments); None: as before.
        """
        if noise_bytes is not None:
            self._noise_bytes[layer] = noise_bytes
        self._note(layer, sum(segment_bytes(segment) for segment in segments))

    def room(self) -> int | None:
        """Bytes of the budget that nothing is kept in; None without a budget."""
        return None if self.budget_bytes is None else max(0, self.budget_bytes - self._others(None))

    def note_stack(self, size_bytes: int) -> None:
        """Count the copies of several layers' rows that are packed together."""
        self._note(None, size_bytes)

    def keep_only(self, layer: int, ordinals: Collection[int]) -> None:
        """Forget chunks of a layer that were dropped, and the noise that it kept."""
        dropped = [key for key in self.kept if key[0] == layer and key[1] not in ordinals]
        for key in dropped:
            del self.kept[key]
        self._noise_bytes.pop(layer, None)

    def clear(self) -> None:
        """Forget all decoded chunks."""
        self.kept = {}
        self._noise_bytes = {}

    def _others(self, layer: int | None) -> int:
        own = 0 if layer is None else self._noise_bytes.get(layer, 0)
        noise = sum(self._noise_bytes.values()) - own
        return noise + sum(segment_bytes(seg) for key, seg in self.kept.items() if key[0] != layer)

    def _make_room(self, chunks: int) -> None:
        """Clear before decoding where that many chunks, as large as the largest kept, overflow."""
        if self.kept and self.budget_bytes is not None:
            largest = max(segment_bytes(segment) for segment in self.kept.values())
            if largest * chunks > self.budget_bytes:
                self.clear()

    def _overflows(self, layer: int, size: int) -> bool:
        """Whether a block of that size is over the budget, other layers' chunks given up first."""
        if self.budget_bytes is None:
            return False
        if self._others(layer) + size > self.budget_bytes:
            self.clear()
        return size > self.budget_bytes

    def _refuse_larger(self, layer: int, chunk_bytes: int) -> None:
        if self.budget_bytes is not None and chunk_bytes > self.budget_bytes:
            raise ValueError(
                f"workspace_bytes {self.budget_bytes} cannot hold one decoded chunk of layer "
                f"{layer}, {chunk_bytes} bytes; give at least that, or None"
            )

    def _note(self, layer: int | None, size: int) -> None:
        self.peak_bytes = max(self.peak_bytes, self._others(layer) + size)

    def _keep(self, layer: int, block: dict[int, Segment], size: int, *, layers: int) -> None:
        if self.budget_bytes is None:
            return
        if max(size * layers, self._others(layer) + size) > self.budget_bytes:
            self.clear()
        else:
            self.kept |= {(layer, ordinal): segment for ordinal, segment in block.items()}
