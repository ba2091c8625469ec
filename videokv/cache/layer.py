"""One layer of a cache: a dense mutable tail, then chunks that are final."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from videokv.cache.chunks import (
    Chunk,
    DenseChunk,
    Job,
    PackedChunk,
    Rows,
    decoded,
    sampled,
    sliced,
)
from videokv.cache.moment import reads_queries, updated
from videokv.cache.narrow import NarrowBuffer, ValueScales, peak
from videokv.cache.rows import SPARE_CHANNELS, Held, Past, RowBuffer
from videokv.cache.select import selected
from videokv.cache.state import Coding, Commit, LayerState, Layout
from videokv.cache.tails import overwrite, pieces, spliced, split
from videokv.cache.workspace import Decoders
from videokv.kernels.quantize_groups import DTYPES as PACKED_DTYPES
from videokv.kernels.reconstruct import Rope, decode_into
from videokv.kernels.reconstruct.decoding import Decoding
from videokv.kernels.score_columns import ChunkColumns, chunk_columns, history_from
from videokv.kernels.score_columns.history import History
from videokv.noise import ScoreNoise
from videokv.protocols import EncodeContext, Packed, Quantizer, Role, Segment
from videokv.tensors import map_tensors, require_finite


class LayerCache:
    """Keys and values of one layer.

    Tensors that are written are copied: nothing of the caller's stays alive. Token positions count
    from the start of the sequence and go on counting when chunks are dropped.
    """

    def __init__(self, index: int, coding: Coding) -> None:
        self.index = index
        self.coding = coding
        self._state = LayerState()
        self._decoding: Decoding | None = None
        self._kept_noise: tuple[History | None, list[tuple[ScoreNoise, ...]]] | None = None
        self._kept_past: Past | None = None
        self._kept_scales: ValueScales | None = None
        self._visible_tokens: int | None = None
        self._columns: WeakKeyDictionary[PackedChunk, ChunkColumns] = WeakKeyDictionary()
        self.encode_calls = 0
        self.decode_calls = 0
        self._peak_of: WeakKeyDictionary[Chunk | Rows, Tensor] = WeakKeyDictionary()

    @property
    def state(self) -> LayerState:
        """What the layer remembers; set as a whole. With its rows goes what reads made of them."""
        return self._state

    @state.setter
    def state(self, state: LayerState) -> None:
        old = self._state
        if state.chunks is not old.chunks:
            self._decoding = None
        changed = state.chunks is not old.chunks or state.open is not old.open
        if changed or state.first != old.first:
            self._kept_noise = self._kept_past = self._kept_scales = self._visible_tokens = None
        self._state = state

    @property
    def noise_bytes(self) -> int:
        """Bytes of the noise that is kept between reads (see ``gathered``)."""
        history = None if self._kept_noise is None else self._kept_noise[0]
        if history is not None:
            return history.nbytes
        return sum(columns.nbytes for columns in self._columns.values())

    @property
    def keeps_columns(self) -> bool:
        """Whether reads since the last change of the rows keep columns of noise between them."""
        return self._kept_noise is not None and self._kept_noise[0] is not None

    @property
    def written_end(self) -> int:
        """Position after the last row written, committed or not."""
        tail = self.state.tail
        return self.state.length if tail is None else tail.end

    @property
    def visible_tokens(self) -> int:
        """Committed tokens that are still held and not forgotten."""
        if self._visible_tokens is None:
            state = self.state
            held = state.chunks if state.open is None else (*state.chunks, state.open)
            counts = (part.end - max(part.start, state.first) for part in held)
            self._visible_tokens = sum(max(0, count) for count in counts)
        return self._visible_tokens

    def write(self, start: int, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Copy rows of tokens ``start...`` into the tail, over what was written there before.

        keys ``[B, Hkv, T, D]``, values ``[B, Hkv, T, Dv]``, queries ``[B, Hq, T, D]`` or None.

        Raises:
            ValueError: shapes or dtypes disagree, or the rows overlap committed ones or leave a
                gap after the rows before.
        """
        layout = self._checked(keys, values, queries)
        tail, length = self.state.tail, self.state.length
        if not length <= start <= self.written_end:
            what = "overlap committed rows" if start < length else "leave a gap"
            raise ValueError(
                f"layer {self.index}: rows from token {start} {what}; {length} tokens are "
                f"committed and rows are written up to {self.written_end}: start in between"
            )
        if keys.shape[2] == 0:
            return
        if not self.coding.reads_queries:
            queries = None
        fresh = Rows(start, keys.detach(), values.detach(), _detached(queries))
        if tail is None or start == length and fresh.end >= tail.end:
            tail = overwrite(tail, fresh)
        else:
            tail = spliced(tail, fresh)
        self.state = replace(self.state, tail=tail, layout=layout)

    def check_commit(self, end: int) -> None:
        """Raise ValueError where rows up to ``end`` were not written."""
        if self.written_end < end:
            raise ValueError(
                f"layer {self.index}: commit({end}) needs its rows up to token {end}, got rows up "
                f"to {self.written_end}; write every layer before the commit"
            )

    def committing(self, end: int) -> list[Tensor]:
        """Keys, values and queries of the rows up to ``end``."""
        tail, count = self.state.tail, end - self.state.length
        assert tail is not None
        rows = tail if tail.tokens == count else tail.first(count)
        both = [rows.keys, rows.values]
        return both if rows.queries is None else [*both, rows.queries]

    def refuse_infinite(self, end: int) -> None:
        """Raise ValueError naming this layer and what is not finite in it."""
        assert self.state.tail is not None
        rows = self.state.tail.first(end - self.state.length)
        for what, tensor in (("keys", rows.keys), ("values", rows.values)):
            require_finite(tensor, what=what, layer=self.index)
        if rows.queries is not None:
            require_finite(rows.queries, what="queries", layer=self.index)

    def begin_commit(self, end: int) -> Commit:
        """Make the tail's rows up to ``end`` final, and say which chunks are packed and dropped.

        The layer changes at ``finish_commit``. Query statistics are updated after packing, so that
        codes depend on the past alone; none are kept where no quantizer looks at them.
        """
        state, policy = self.state, self.coding.policy
        assert state.tail is not None and state.layout is not None
        fresh, rest = split(state.tail, end - state.length)
        cut, waiting = pieces(state.open, fresh, policy.chunk_tokens)
        chunks = [*state.chunks, *self._dense(cut)]
        surplus = policy.surplus([chunk.ordinal for chunk in chunks])
        moment, coding = state.moment, self.coding
        wanted = reads_queries(coding.keys) or reads_queries(coding.values)
        if wanted and fresh.queries is not None:
            # Of the state before: packing below still sees the queries of the past alone.
            moment = updated(moment, fresh.queries, kv_heads=state.layout.kv_heads)
        after = replace(
            state,
            length=end,
            next_ordinal=state.next_ordinal + len(cut),
            open=waiting,
            tail=rest,
            moment=moment,
        )
        newest = chunks[-1].ordinal if chunks else 0
        places = [
            place
            for place, chunk in enumerate(chunks)
            if isinstance(chunk, DenseChunk)
            and chunk.ordinal not in surplus
            and self._to_pack(chunk, newest)
        ]
        return Commit(after, chunks, places, surplus)

    def job(self, commit: Commit, place: int) -> Job:
        """What is known for packing the chunk at a place, once those before it are packed."""
        chunk = commit.chunks[place]
        assert isinstance(chunk, DenseChunk)
        before = (c for c in reversed(commit.chunks[:place]) if isinstance(c, PackedChunk))
        return Job(self.index, chunk, next(before, None), self.state.moment)

    def packed(self, job: Job, *, scale: float) -> PackedChunk:
        """The chunk of a job in few bits."""
        chunk, previous = job.chunk, job.previous
        before = (None, None) if previous is None else (previous.keys, previous.values)
        keys = self._encoded(chunk.keys, "key", self.coding.keys, before[0])
        values = self._encoded(chunk.values, "value", self.coding.values, before[1])
        factors = None
        if self.coding.correction is not None and not isinstance(keys, Tensor):
            factors = self.coding.correction.fit(keys, chunk.keys, chunk.queries, scale=scale)
        return PackedChunk(chunk.ordinal, chunk.start, chunk.tokens, keys, values, factors)

    def packed_elsewhere(self, chunk: PackedChunk, columns: ChunkColumns | None) -> None:
        """A chunk of this layer was packed with those of others; columns: of its noise, if made."""
        self.encode_calls += len(chunk.sides())
        if columns is not None:
            self._columns[chunk] = columns

    def finish_commit(self, commit: Commit) -> None:
        """Take the packed chunks, drop the surplus ones."""
        kept = tuple(chunk for chunk in commit.chunks if chunk.ordinal not in commit.surplus)
        self.state = replace(commit.end, chunks=kept)

    def decoders(self, ranges: Sequence[tuple[int, int]] | None = None) -> Decoders:
        """For each packed chunk, by ordinal: what decodes it, with the noise to correct.

        ranges: only chunks that hold tokens of these (start, end).
        """
        return {
            chunk.ordinal: self._decoder(chunk)
            for chunk in self.state.chunks
            if isinstance(chunk, PackedChunk)
            and (ranges is None or any(a < chunk.end and chunk.start < b for a, b in ranges))
        }

    def segments(
        self, unpacked: dict[int, Segment], *, tail: bool = False
    ) -> list[tuple[int, Segment]]:
        """(start, segment) of everything committed, in order, packed chunks taken from
        ``unpacked``; with ``tail`` the rows not yet committed too."""
        state = self.state
        found = [
            (chunk.start, Segment(chunk.keys, chunk.values))
            if isinstance(chunk, DenseChunk)
            else (chunk.start, unpacked[chunk.ordinal])
            for chunk in state.chunks
            if isinstance(chunk, DenseChunk) or chunk.ordinal in unpacked
        ]
        for rows in (state.open, state.tail if tail else None):
            if rows is not None:
                found.append((rows.start, Segment(rows.keys, rows.values)))
        return [part for start, whole in found for part in self._remembered(start, whole)]

    def one_side(
        self, side: Role, span: tuple[int, int], *, rope: Rope | None, kept: dict[int, Segment]
    ) -> list[tuple[Tensor, tuple[ScoreNoise, ...]]]:
        """Rows of the tokens of a span, the noise beside keys; packed ones are decoded on one side.

        rope: turns keys; a row for each token of the span. kept: chunks that were decoded before,
        by ordinal. Tokens that are not held are left out.
        """
        state = self.state
        found = []
        for part in (
            *state.chunks,
            *(rows for rows in (state.open, state.tail) if rows is not None),
        ):
            low, high = max(span[0], part.start, state.first), min(span[1], part.end)
            if low >= high:
                continue
            turn = None if rope is None else rope.rows(low - span[0], high - span[0])
            whole = (low, high) == (part.start, part.end)
            rows, noise = self._one_side(part, side, kept, rope=turn if whole else None)
            if not whole:
                segment = sliced(Segment(rows, rows, noise), low - part.start, high - part.start)
                rows = segment.keys if turn is None else turn.turn(segment.keys)
                noise = segment.noise
            found.append((rows, noise))
        return found

    def _one_side(
        self, part: Chunk | Rows, side: Role, kept: dict[int, Segment], *, rope: Rope | None
    ) -> tuple[Tensor, tuple[ScoreNoise, ...]]:
        """All rows of a chunk (or of rows that are no chunk yet), turned where there is a rope."""
        assert self.state.layout is not None
        held = part.keys if side == "key" else part.values
        if isinstance(held, Tensor):
            return (held if rope is None else rope.turn(held)), ()
        assert isinstance(part, PackedChunk)
        noise: tuple[ScoreNoise, ...] = ()
        if side == "key" and self.coding.correction is not None:
            noise = tuple(self.coding.correction.noise(held, part.factors))
        if part.ordinal in kept:
            rows = kept[part.ordinal].keys if side == "key" else kept[part.ordinal].values
            return (rows if rope is None else rope.turn(rows)), noise
        self.decode_calls += 1
        layout = self.state.layout
        out = torch.empty(held.shape, dtype=layout.dtype, device=layout.device)
        decode_into(held, out, rope=rope)
        return out, noise

    def packed_segments(self, unpacked: dict[int, Segment]) -> list[Segment]:
        """The packed chunks in ``unpacked`` alone, without what was forgotten."""
        return [
            part
            for chunk in self.state.chunks
            if chunk.ordinal in unpacked
            for _, part in self._remembered(chunk.start, unpacked[chunk.ordinal])
        ]

    def forget(self, before: int) -> None:
        """Nothing before token ``before`` is read any more; chunks that end there are freed."""
        state = self.state
        first = min(max(before, state.first), state.length)
        waiting = state.open if state.open is None or state.open.end > first else None
        chunks = tuple(chunk for chunk in state.chunks if chunk.end > first)
        self.state = replace(state, first=first, chunks=chunks, open=waiting)

    def gathered(
        self, current: Segment, *, keep: bool = False, apart: bool = False
    ) -> list[Segment]:
        """Everything committed and the current rows, one after the other in one buffer.

        apart: the current rows stay where they are.
        keep: the noise is that of a ``History``, made at the first read after the committed rows
            changed from columns that are made once for each chunk.
        """
        spare = 0 if self.coding.correction is None else SPARE_CHANNELS
        rows = RowBuffer(self._past(keep=keep), current, spare=spare, apart=apart)
        found, self._decoding = rows.fill(self._decoding)
        return found

    def gathered_narrow(self, current: Segment, *, keep: bool = False) -> list[Segment]:
        """Everything committed in one buffer, values in E4M3, and the current rows as they are."""
        rows = NarrowBuffer(self._past(keep=keep), current, scales=self._value_scales())
        found, self._decoding = rows.fill(self._decoding)
        return [*found, current]

    def _visible(self) -> list[tuple[Chunk | Rows, int]]:
        """Chunks and waiting rows that may be read, with how many rows of each were forgotten."""
        state = self.state
        held: tuple[Chunk | Rows, ...] = state.chunks
        held = held if state.open is None else (*held, state.open)
        return [(p, max(0, state.first - p.start)) for p in held if p.end > state.first]

    def _past(self, *, keep: bool) -> Past:
        """All committed rows that may be read; kept while they are, where their noise is too."""
        past = self._kept_past
        if past is None or not (keep or self.coding.correction is None):
            visible = self._visible()
            noise = self._noise_of_all(visible) if keep else None
            past = Past.of([*self._sources(visible, noise)])
            if self._stays(visible, noise):
                self._kept_past = past
        self.decode_calls += len(past.packed)
        return past

    def _stays(self, visible: Sequence[tuple[Chunk | Rows, int]], noise: Sequence | None) -> bool:
        """Whether what was made of these parts is no more than views of what is kept anyhow."""
        if any(gone and isinstance(part, PackedChunk) for part, gone in visible):
            return False  # decoded rows
        if self.coding.correction is None:
            return True
        return noise is not None and self._kept_noise is not None

    def _sources(
        self,
        visible: Sequence[tuple[Chunk | Rows, int]],
        kept: Sequence[tuple[ScoreNoise, ...]] | None,
    ) -> Iterator[Held]:
        """Keys, values and noise (the kept one, or anew) of these parts, in order."""
        for number, (part, skipped) in enumerate(visible):
            keys, values = part.keys, part.values
            noise = self._noise(part, skipped) if kept is None else kept[number]
            if isinstance(part, PackedChunk) and skipped:
                # The rows that were not forgotten are decoded with the others.
                assert self.state.layout is not None
                dtype = self.state.layout.dtype
                self.decode_calls += len(part.sides())
                keys, values = (decoded(side, dtype) for side in (keys, values))
            if skipped:
                assert isinstance(keys, Tensor) and isinstance(values, Tensor)
                keys, values = keys[:, :, skipped:], values[:, :, skipped:]
            yield Held(keys, values, noise, isinstance(part, PackedChunk))

    def _noise(self, part: Chunk | Rows, skipped: int) -> tuple[ScoreNoise, ...]:
        """The noise to correct in rows of which the first ``skipped`` were forgotten."""
        correction = self.coding.correction
        if correction is None or not isinstance(part, PackedChunk):
            return ()
        if isinstance(part.keys, Tensor):
            return ()
        noise = tuple(correction.noise(part.keys, part.factors))
        if not skipped:
            return noise
        rows = torch.empty(part.keys.shape[:3], device="meta").unsqueeze(3)
        return sliced(Segment(rows, rows, noise), skipped, part.tokens).noise

    def _noise_of_all(
        self, visible: Sequence[tuple[Chunk | Rows, int]]
    ) -> list[tuple[ScoreNoise, ...]] | None:
        """Noise of every visible part, kept while the parts are; None where it cannot be kept."""
        layout = self.state.layout
        if self.coding.correction is None or layout is None:
            return [()] * len(visible)
        if self._kept_noise is None:
            if self._capturing():
                return [self._noise(part, gone) for part, gone in visible]
            self._kept_noise = self._history(visible, layout) or (None, [])
        history, kept = self._kept_noise
        return None if history is None else kept

    def _history(
        self, visible: Sequence[tuple[Chunk | Rows, int]], layout: Layout
    ) -> tuple[History, list[tuple[ScoreNoise, ...]]] | None:
        """Of all visible parts; None where there is no noise, or some that cannot be kept."""
        shape = (layout.batch, layout.kv_heads, layout.key_dim)
        rows = []
        for part, gone in visible:
            columns = self._columns_of(part, layout)
            if columns is None:
                self._columns.clear()
                return None
            rows.append((part.tokens - gone, columns.after(gone)))
        return history_from(rows, shape=shape)

    def _columns_of(self, part: Chunk | Rows, layout: Layout) -> ChunkColumns | None:
        """Made once for each packed chunk; None where its noise cannot be kept."""
        if not isinstance(part, PackedChunk) or isinstance(part.keys, Tensor):
            return ChunkColumns()
        columns = self._columns.get(part)
        if columns is None:
            shape = (layout.batch, layout.kv_heads, layout.key_dim)
            columns = chunk_columns(
                self._noise(part, 0), tokens=part.tokens, shape=shape, dtype=layout.dtype
            )
            if columns is not None:
                self._columns[part] = columns
        return columns

    def _value_scales(self) -> ValueScales:
        """Of all committed values; kept while they are."""
        scales = self._kept_scales
        if scales is None:
            scales = ValueScales.of(self._value_peak())
            if not self._capturing():
                self._kept_scales = scales
        return scales

    def _capturing(self) -> bool:
        """Whether memory is a CUDA graph's own, and must not be kept."""
        layout = self.state.layout
        on_gpu = layout is not None and layout.device.type == "cuda"
        return on_gpu and torch.cuda.is_current_stream_capturing()

    def _value_peak(self) -> Tensor:
        """The largest magnitudes ``[B, Hkv]`` of all committed values."""
        waiting = () if self.state.open is None else (self.state.open,)
        held: tuple[Chunk | Rows, ...] = (*self.state.chunks, *waiting)
        return torch.stack([self._peak(part) for part in held]).amax(0)

    def _peak(self, part: Chunk | Rows) -> Tensor:
        """Looked at once: final rows do not change."""
        found = self._peak_of.get(part)
        if found is None:
            assert self.state.layout is not None
            self.decode_calls += 0 if isinstance(part.values, Tensor) else 1
            found = peak(decoded(part.values, self.state.layout.dtype))
            if not self._capturing():
                self._peak_of[part] = found
        return found

    def crop(self, length: int, *, decode_partial: bool) -> None:
        """Forget every token from ``length`` on, the tail included.

        Query statistics stay. A packed chunk is never packed again: cutting inside one raises
        ValueError, or with ``decode_partial`` its first rows are decoded and stay dense.
        """
        state = self.state
        chunks: list[Chunk] = [chunk for chunk in state.chunks if chunk.end <= length]
        cut = [chunk for chunk in state.chunks if chunk.start < length < chunk.end]
        chunks += [self._cut(chunk, length, decode_partial=decode_partial) for chunk in cut]
        later = [chunk.ordinal for chunk in state.chunks if chunk.start >= length]
        waiting = state.open
        if waiting is not None:
            kept = length - waiting.start
            waiting = waiting[:kept] if kept > 0 else None
        self.state = replace(
            state,
            length=min(length, state.length),
            first=min(length, state.first),
            next_ordinal=min([*later, state.next_ordinal]) if length else 0,
            chunks=tuple(chunks),
            open=waiting,
            tail=None,
        )

    def keep(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Forget chunks that hold no token of these (start, end) ranges."""
        kept = tuple(
            chunk
            for chunk in self.state.chunks
            if any(first < chunk.end and chunk.start < last for first, last in ranges)
        )
        self.state = replace(self.state, chunks=kept)

    def select_batch(self, index: Tensor) -> None:
        """Keep the batch rows ``index`` (in that order, repeats allowed), codes unchanged."""
        if self.state.layout is not None:
            layout = replace(self.state.layout, batch=index.numel())
            batch = self.state.layout.batch
            self.state = replace(
                selected(self.state, index.to(layout.device), batch=batch), layout=layout
            )

    def to(self, device: torch.device) -> None:
        """Move everything to a device."""
        if self.state.layout is not None:
            layout = replace(self.state.layout, device=device)
            self.state = replace(map_tensors(self.state, _mover(device)), layout=layout)

    def held(self) -> list[object]:
        """Everything that attention reads now or once it is committed."""
        rows = [rows for rows in (self.state.open, self.state.tail) if rows is not None]
        dense = [(each.keys, each.values) for each in rows]
        return [*(chunk.stored() for chunk in self.state.chunks), *dense]

    def statistics(self) -> list[object]:
        """What only the writer needs: the second moment and queries kept for a fit."""
        state = self.state
        rows = [rows.queries for rows in (state.open, state.tail) if rows is not None]
        kept = [chunk.queries for chunk in state.chunks if isinstance(chunk, DenseChunk)]
        return [state.moment, *rows, *kept]

    def dense_bytes(self) -> int:
        """Bytes of the same tokens (and tail) in the model's dtype."""
        state = self.state
        if state.layout is None:
            return 0
        tail = 0 if state.tail is None else state.tail.tokens
        return state.layout.token_bytes() * (self.visible_tokens + tail)

    def _checked(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> Layout:
        where = f"layer {self.index}"
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"{where}: keys and values must be [B, Hkv, T, D] with equal B, Hkv and T, got "
                f"{tuple(keys.shape)} and {tuple(values.shape)}"
            )
        if not keys.dtype.is_floating_point or values.dtype != keys.dtype:
            raise ValueError(
                f"{where}: keys and values must share a floating-point dtype, got {keys.dtype} "
                f"and {values.dtype}"
            )
        layout, expected = Layout.of(keys, values), self.state.layout
        if 0 in (layout.batch, layout.kv_heads, layout.key_dim, layout.value_dim):
            raise ValueError(
                f"{where}: batch, heads and head sizes must be at least 1, got keys "
                f"{tuple(keys.shape)} and values {tuple(values.shape)}"
            )
        if not self.coding.dense and keys.dtype not in PACKED_DTYPES:
            raise ValueError(
                f"{where}: keys and values that are packed must be one of {PACKED_DTYPES}, got "
                f"{keys.dtype}; convert them, or use a recipe without quantizers"
            )
        if expected is not None and layout.describe() != expected.describe():
            raise ValueError(
                f"{where} holds {expected.describe()}; got {layout.describe()}. Reset the cache "
                "or make another one"
            )
        if queries is not None:
            _check_queries(queries, keys, where)
        if expected is None:
            for quantizer, size in (
                (self.coding.keys, layout.key_dim),
                (self.coding.values, layout.value_dim),
            ):
                if quantizer is not None:
                    quantizer.check(size)
        return layout

    def _dense(self, pieces: Sequence[Rows]) -> list[DenseChunk]:
        return [
            DenseChunk(
                ordinal,
                piece.start,
                piece.keys,
                piece.values,
                sampled(piece.queries) if self._needs_queries(ordinal) else None,
            )
            for ordinal, piece in enumerate(pieces, self.state.next_ordinal)
        ]

    def _needs_queries(self, ordinal: int) -> bool:
        """Whether a chunk will be fitted to queries one day: sink chunks never are."""
        return reads_queries(self.coding.correction) and ordinal >= self.coding.policy.sink_chunks

    def _to_pack(self, chunk: DenseChunk, newest: int) -> bool:
        dense = self.coding.dense or chunk.pinned
        return not dense and not self.coding.policy.stays_dense(chunk.ordinal, newest)

    def _encoded(
        self,
        x: Tensor,
        role: Role,
        quantizer: Quantizer | None,
        previous: Packed | Tensor | None,
    ) -> Packed | Tensor:
        if quantizer is None:
            return x
        moment = self.state.moment
        self.encode_calls += 1
        return quantizer.encode(
            x,
            EncodeContext(
                layer=self.index,
                role=role,
                seed=self.coding.seed,
                query_moment=None if moment is None else moment.mean,
                query_count=0 if moment is None else moment.count,
                previous=None if isinstance(previous, Tensor) else previous,
            ),
        )

    def _remembered(self, start: int, segment: Segment) -> list[tuple[int, Segment]]:
        """The rows of a segment that were not forgotten, with their start; [] if none is left."""
        skipped, tokens = max(0, self.state.first - start), segment.keys.shape[2]
        if skipped >= tokens > 0:
            return []
        return [(start + skipped, sliced(segment, skipped, tokens))]

    def _decoder(self, chunk: PackedChunk) -> Callable[[], Segment]:
        def decode() -> Segment:
            assert self.state.layout is not None
            dtype, correction = self.state.layout.dtype, self.coding.correction
            self.decode_calls += len(chunk.sides())
            noise: tuple = ()
            if correction is not None and not isinstance(chunk.keys, Tensor):
                noise = correction.noise(chunk.keys, chunk.factors)
            keys, values = (decoded(side, dtype) for side in (chunk.keys, chunk.values))
            return Segment(keys, values, noise, packed=True)

        return decode

    def _cut(self, chunk: Chunk, length: int, *, decode_partial: bool) -> DenseChunk:
        count = length - chunk.start
        if isinstance(chunk, DenseChunk):
            keys, values = (t[:, :, :count].clone() for t in (chunk.keys, chunk.values))
            return replace(chunk, keys=keys, values=values)
        if not decode_partial:
            raise ValueError(
                f"layer {self.index}: crop({length}) cuts the packed chunk of tokens "
                f"{chunk.start}..{chunk.end}; crop to {chunk.start} or {chunk.end}, or pass "
                "decode_partial=True to keep its first rows dense"
            )
        part = sliced(self._decoder(chunk)(), 0, count)
        return DenseChunk(
            chunk.ordinal, chunk.start, part.keys.clone(), part.values.clone(), pinned=True
        )


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _mover(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Moves each tensor once, so that what chunks share stays shared."""
    moved: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device)
        return moved[id(tensor)]

    return move


def _check_queries(queries: Tensor, keys: Tensor, where: str) -> None:
    batch, heads, tokens, size = keys.shape
    fits = queries.ndim == 4 and queries.shape[1] % max(heads, 1) == 0
    if not fits or (queries.shape[0], *queries.shape[2:]) != (batch, tokens, size):
        raise ValueError(
            f"{where}: queries must be [B, Hq, T, D] for keys {tuple(keys.shape)}, Hq a multiple "
            f"of {heads}, got {tuple(queries.shape)}"
        )
