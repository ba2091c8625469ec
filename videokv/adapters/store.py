"""What all adapters of video models share: a cache behind buffers whose rows the model moves.

A ``Store`` is the cache of one guidance branch. The model writes rows of a layer's buffer, at every
denoising step over the same ones; rows become final when the model goes on to later tokens, which
``advance`` (start of a pass) or the first write of new rows tells. Rolling a window re-labels rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from videokv.adapters.rows import Piece, Pieces, cut, holds, laid_over, length, paired, ranges
from videokv.adapters.served import check_window
from videokv.adapters.verify import RecordingCache
from videokv.cache import KVCache
from videokv.cache.state import LayerState
from videokv.protocols import Segment

Side = Literal["key", "value"]


class Store:
    """The cache of one guidance branch.

    make: gives an empty cache. snapshot: the model re-encodes its history for every chunk, so query
    statistics outlive a rebuild; otherwise a rebuild is a new video and starts from nothing.
    """

    def __init__(self, make: Callable[[], KVCache], *, snapshot: bool = False) -> None:
        self._make = make
        self.snapshot = snapshot
        self.cache = make()
        check_window(self.cache.recipe)
        # Whoever reads a layer holds it, and a layer holds its store: no cycle keeps rows alive.
        self.layers: weakref.WeakValueDictionary[int, StoredLayer] = weakref.WeakValueDictionary()
        self.position: int | None = None

    def layer(self, index: int, *, rows: int) -> StoredLayer:
        """The layer, made with an empty buffer of that many rows when first asked for."""
        found = self.layers.get(index)
        if found is None:
            found = self.layers[index] = StoredLayer(self, index, rows)
        return found

    def advance(self, position: int | None) -> None:
        """A pass starts at this position; if it is a later one, what was written is final."""
        if position is not None and self.position is not None and position > self.position:
            self.commit()
        self.position = position

    def settle(self) -> None:
        """Hand over rows that no attention has asked for yet."""
        for layer in self.layers.values():
            layer.settle(None)

    def commit(self, end: int | None = None) -> None:
        """Rows up to token ``end`` (all written ones) are final in every layer."""
        self.settle()
        written = max((layer.written for layer in self.layers.values()), default=0)
        end = written if end is None else end
        if end > self.cache.length:
            self.cache.commit(end)

    def rebuild(self) -> None:
        """Forget all rows; a snapshot model keeps its query statistics."""
        self.cache = made_anew(self.cache, self._make, keep_statistics=self.snapshot)
        for layer in self.layers.values():
            layer.forget()


class StoredLayer:
    """One layer of a store: where its rows are, and the rows just written."""

    def __init__(self, store: Store, index: int, rows: int) -> None:
        self.store = store
        self.index = index
        self.rows = rows
        empty: Pieces = (Piece(rows),)
        self.pieces: dict[Side, Pieces] = {"key": empty, "value": empty}
        self.written = 0
        self._fresh: dict[Side, tuple[int, Tensor, Pieces]] = {}
        self._query: Tensor | None = None

    def put(self, side: Side, first: int, rows: Tensor) -> None:
        """The model assigns dense rows ``[B, n, H, D]`` from row ``first`` on."""
        if side in self._fresh:
            self.settle(None)
        count = rows.shape[1]
        before = cut(self.pieces[side], first, first + count)
        self._fresh[side] = (first, rows, before)
        self.pieces[side] = laid_over(self.pieces[side], first, (Piece(count, dense=rows),))
        if len(self._fresh) == 2 and self._query is not None:
            self.settle(self._query)

    def move(self, side: Side, first: int, pieces: Pieces) -> None:
        """The model assigns rows of this buffer to other rows of it."""
        self.settle(None)
        self.pieces[side] = laid_over(self.pieces[side], first, pieces)

    def settle(self, query: Tensor | None) -> None:
        """Write fresh rows to the cache; query ``[B, n or more, Hq, D]`` of the same pass."""
        if not self._fresh:
            return
        (first, keys, before), (other, values, _) = self._both()
        if first != other or keys.shape[1] != values.shape[1]:
            raise ValueError(
                f"layer {self.index}: keys were written to rows {first}..{first + keys.shape[1]} "
                f"but values to {other}..{other + values.shape[1]}; write both alike"
            )
        self._fresh = {}
        token = self._place(first, before)
        count = keys.shape[1]
        self.store.cache.write(
            self.index, token, _heads(keys), _heads(values), self._matching(query, count)
        )
        self._query = None
        self.written = token + count
        for side in self.pieces:
            fresh = (Piece(count, token),)
            self.pieces[side] = laid_over(self.pieces[side], first, fresh)
        self._drop_unseen()

    def attend(
        self,
        query: Tensor,
        keys: Pieces,
        values: Pieces,
        *,
        scale: float | None = None,
        key_query: Tensor | None,
    ) -> Tensor:
        """Attention of ``[B, M, Hq, D]`` over rows of this layer; ``[B, M, Hq, Dv]``.

        key_query: the queries in the basis in which keys are written, where the model shows them.
        """
        if self._fresh:
            self.settle(key_query)
        else:
            self._query = key_query
        output = attend_pieces(
            self.store.cache, self.index, _heads(query), keys, values, scale=scale
        )
        return output.transpose(1, 2).contiguous()

    def forget(self) -> None:
        """All rows are unwritten again, but for those the model has just assigned."""
        self.written = 0
        for side in self.pieces:
            self.pieces[side] = (Piece(self.rows),)
            if side in self._fresh:
                first, rows, _ = self._fresh[side]
                fresh = Piece(rows.shape[1], dense=rows)
                self.pieces[side] = laid_over(self.pieces[side], first, (fresh,))
                self._fresh[side] = (first, rows, (Piece(rows.shape[1]),))

    def dense(self, side: Side, pieces: Pieces) -> Tensor:
        """Rows as a tensor ``[B, n, H, D]``, some of which are written; the others are zeros."""
        parts: list[Tensor | int] = []
        for piece in pieces:
            if piece.dense is not None:
                parts.append(piece.dense)
            elif piece.token is not None:
                for segment in view(self.store.cache, self.index, piece):
                    part = segment.keys if side == "key" else segment.values
                    parts.append(part.transpose(1, 2))
            else:
                parts.append(piece.count)
        like = next(part for part in parts if isinstance(part, Tensor))
        return torch.cat([_rows_like(like, part) for part in parts], 1)

    def _both(self) -> tuple[tuple[int, Tensor, Pieces], tuple[int, Tensor, Pieces]]:
        if len(self._fresh) < 2:
            (side,) = self._fresh
            raise ValueError(
                f"layer {self.index}: only its {side}s were written; this version of the model "
                "does not write keys and values in turn, which videokv needs"
            )
        return self._fresh["key"], self._fresh["value"]

    def _place(self, first: int, before: Pieces) -> int:
        """The token of the first fresh row: a written one over again, or a new one."""
        cache = self.store.cache
        start = before[0].token if before else None
        elsewhere = start is not None and holds(self.pieces["key"], start)
        if start is not None and start >= cache.length and not elsewhere:
            return start
        if start is not None and not elsewhere:
            # Rows that are final are written anew: the model starts over from here.
            if first == 0:
                self.store.rebuild()
            else:
                self._rewind(start)
            return self.store.cache.length
        if self.written > cache.length:
            self.store.commit(self.written)
        return max(self.written, self.store.cache.length)

    def _rewind(self, token: int) -> None:
        if token < self.store.cache.length:
            self.store.cache.crop(token)
        for layer in self.store.layers.values():
            layer.written = min(layer.written, token)
            for side, pieces in layer.pieces.items():
                layer.pieces[side] = _without(pieces, token)

    def _matching(self, query: Tensor | None, count: int) -> Tensor | None:
        """The queries of the fresh tokens, which are the first ones of the pass."""
        if query is None or query.shape[1] < count:
            return None
        return _heads(query[:, :count])

    def _drop_unseen(self) -> None:
        held = ranges(self.pieces["key"])
        self.store.cache.keep(self.index, held)


def made_anew(old: KVCache, make: Callable[[], KVCache], *, keep_statistics: bool) -> KVCache:
    """An empty cache in the place of ``old``, with its query statistics or without."""
    cache = make()
    if keep_statistics:
        kept = {
            index: LayerState(moment=state.moment, layout=state.layout)
            for index, state in old.layer_states().items()
        }
        cache.restore(kept, length=0)
    return cache


def attend_pieces(
    cache: KVCache,
    layer: int,
    query: Tensor,
    keys: Pieces,
    values: Pieces,
    *,
    scale: float | None = None,
) -> Tensor:
    """softmax over pieces in row order; query ``[B, Hq, M, D]`` -> ``[B, Hq, M, Dv]``.

    A single dense piece behind all that is committed takes the cache's own way (bounded workspace,
    recorded mass); any other order is put together from views.
    """
    if length(keys) != length(values):
        raise ValueError(
            f"layer {layer}: attention over {length(keys)} key rows but {length(values)} value rows"
        )
    if any(piece.empty for piece in (*keys, *values)):
        raise ValueError(
            f"layer {layer}: attention over {length(keys)} rows, some of which were never written; "
            "write the rows first, or read fewer"
        )
    pairs = paired(keys, values)
    if _usual(cache, layer, pairs):
        key, value = pairs[-1]
        assert key.dense is not None and value.dense is not None
        return cache.attend(layer, query, _heads(key.dense), _heads(value.dense), scale=scale)

    def segments(source: KVCache) -> list[Segment]:
        read = pairs
        if source is not cache:
            read = [(key.without_noise(), value.without_noise()) for key, value in pairs]
        return [part for key, value in read for part in _segments(source, layer, key, value)]

    return attend_segments(cache, layer, query, segments, scale=scale)


def attend_segments(
    cache: KVCache,
    layer: int,
    query: Tensor,
    segments: Callable[[KVCache], Sequence[Segment]],
    *,
    scale: float | None = None,
) -> Tensor:
    """One softmax over what ``segments`` takes from the cache, current rows included.

    Segments of batch 1 serve every row of the query's batch.
    """
    if cache.record_mass:
        raise ValueError(
            f"layer {layer}: this model reads its cache in parts, whose attention mass is not "
            "recorded; leave out record_mass"
        )

    def output(source: KVCache) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            return source.recipe.attend(
                query,
                [_widened(segment, query.shape[0]) for segment in segments(source)],
                scale=query.shape[-1] ** -0.5 if scale is None else scale,
                causal=False,
                need_lse=False,
            )[0]

    found = output(cache)
    if isinstance(cache, RecordingCache):
        cache.compare(layer, found, output(cache.dense))
    return found


def view(cache: KVCache, layer: int, piece: Piece) -> list[Segment]:
    """The segments of a piece of cached tokens."""
    assert piece.token is not None
    span = (piece.token, piece.token + piece.count)
    return cache.view(layer, [span], tail=span[1] > cache.length)


def _segments(cache: KVCache, layer: int, key: Piece, value: Piece) -> list[Segment]:
    if key.dense is not None:
        if value.dense is not None:
            return [Segment(_heads(key.dense), _heads(value.dense), key.noise)]
        # Keys that were rotated after decoding, values still in the cache.
        assert value.token is not None
        span = (value.token, value.token + value.count)
        found = cache.side(layer, "value", span, tail=span[1] > cache.length)
        parts = torch.cat([rows for rows, _ in found], 2)
        return [Segment(_heads(key.dense), parts, key.noise)]
    if key.token != value.token:
        raise ValueError(f"layer {layer}: keys and values of other tokens were paired")
    return view(cache, layer, key)


def _rows_like(like: Tensor, rows: Tensor | int) -> Tensor:
    """The rows, or that many zeros ``[B, n, H, D]``."""
    if isinstance(rows, Tensor):
        return rows
    return like.new_zeros(like.shape[0], rows, *like.shape[2:])


def _usual(cache: KVCache, layer: int, pairs: list[tuple[Piece, Piece]]) -> bool:
    """Whether it is all that is committed, and then dense rows."""
    *past, (last, _) = pairs
    if last.dense is None or any(k.token is None or k.token != v.token for k, v in past):
        return False
    held = ranges(tuple(key for key, _ in past))
    committed = all(end <= cache.length for _, end in held)
    return committed and sum(end - start for start, end in held) == cache.held_tokens(layer)


def _widened(segment: Segment, batch: int) -> Segment:
    if segment.keys.shape[0] == batch:
        return segment
    keys = segment.keys.expand(batch, -1, -1, -1)
    return Segment(keys, segment.values.expand(batch, -1, -1, -1), segment.noise)


def _heads(rows: Tensor) -> Tensor:
    """``[B, T, H, D]`` as ``[B, H, T, D]``."""
    return rows.transpose(1, 2)


def _without(pieces: Pieces, token: int) -> Pieces:
    """The same rows, those of tokens from ``token`` on unwritten."""
    kept: list[Piece] = []
    for piece in pieces:
        if piece.token is None or piece.token + piece.count <= token:
            kept.append(piece)
        elif piece.token >= token:
            kept.append(Piece(piece.count))
        else:
            count = token - piece.token
            kept += [piece.part(0, count), Piece(piece.count - count)]
    return tuple(kept)
