"""Layers of one shape are packed together, as batch rows of one tensor.

On a GPU a commit waits for the host, which starts the same few dozen kernels for every layer.
Quantizers that treat every batch row and head as if it were alone give the same codes, steps and
factors when the rows of several layers are stacked along the batch; the results are split again
into tensors that own their storage, so that each layer frees what it drops.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from videokv.cache.chunks import SAMPLED_QUERIES, DenseChunk, Job, PackedChunk
from videokv.cache.layer import LayerCache
from videokv.cache.moment import reads_queries
from videokv.cache.rows import SPARE_CHANNELS
from videokv.cache.state import Coding
from videokv.kernels.gpu import say_once
from videokv.kernels.score_columns import ChunkColumns, chunk_columns
from videokv.protocols import Correction, EncodeContext, Packed, Quantizer, Role
from videokv.tensors import held_bytes, walk_tensors

STACKED_ON = ("cuda",)  # device types where starting kernels costs more than copying rows
MOST_HEADS = 65535  # batch rows times heads that a kernel's grid takes

_LEAVES = {Tensor, torch.dtype, torch.Size, type(None), bool, int, float, str}

T = TypeVar("T")
_Keys = tuple[Packed | None, Tensor | None, ChunkColumns | None]


class _Unlike(Exception):
    """Tensors or fields differ between layers, or do not have the batch first."""


@dataclass(frozen=True)
class Stacked:
    """chunks: one a layer. columns: what reads keep of their noise, None where it has to be made at
    the first read. stack_bytes: of the stacked copies, and of what was packed of them, that were
    alive at once."""

    chunks: list[PackedChunk]
    columns: list[ChunkColumns | None]
    stack_bytes: int


def groups(
    layers: Sequence[LayerCache], end: int, *, room_bytes: int | None
) -> Iterator[list[LayerCache]]:
    """Consecutive layers that pack chunks of the same kinds when rows up to ``end`` are committed.

    A group's copies, and what is packed from them, take at most what a layer's last read took (its
    visible tokens in the model's dtype), and at most ``room_bytes``; a layer of its own may take
    more. Keys are packed, and apart again, before values are stacked.
    """
    first = 0
    while first < len(layers):
        most, last = _most(layers[first], end, room_bytes), first + 1
        kind = _kind(layers[first]) if most > 1 else None
        while kind is not None and last < len(layers) and _kind(layers[last]) == kind:
            last += 1
        yield from _evenly(layers[first:last], most)
        first = last


def _evenly(layers: Sequence[LayerCache], most: int) -> Iterator[list[LayerCache]]:
    """As few groups of at most ``most`` layers as there can be, none much larger than another."""
    count = -(-len(layers) // most)
    for number in range(count):
        first, last = (len(layers) * place // count for place in (number, number + 1))
        yield list(layers[first:last])


def packed_together(
    coding: Coding, jobs: Sequence[Job], *, scale: float, columns: bool = False
) -> Stacked | None:
    """The chunks that packing each job alone would give; None where that has to be done: parts of
    the jobs differ, the format depends on the numbers, or something is refused (alone, the error
    names its layer). The reason is said once. columns: make those of the chunks too."""
    try:
        return _packed(coding, jobs, scale=scale, columns=columns)
    except _Unlike:
        reason = "their formats depend on their numbers or differ"
    except torch.OutOfMemoryError:
        reason = "memory is short"
    except ValueError:  # whose words name the first layer, whichever it is about
        reason = "together they are refused"
    say_once(f"layers are packed one by one: {reason}")
    return None


def _packed(coding: Coding, jobs: Sequence[Job], *, scale: float, columns: bool) -> Stacked:
    """Side by side: what was packed of keys is each layer's own before values are stacked."""
    chunks = [job.chunk for job in jobs]
    stack = _Stack(len(jobs), chunks[0].keys.shape[0])
    keys: list[_Keys] = [(None, None, None)] * len(jobs)
    values: list[Packed | None] = [None] * len(jobs)
    if coding.keys is not None:
        keys = _packed_keys(coding, coding.keys, jobs, stack, scale=scale, columns=columns)
    if coding.values is not None:
        rows = stack.rows([chunk.values for chunk in chunks])
        values = stack.split(_encoded(coding.values, coding.seed, "value", rows, jobs, stack))
    done = [
        _chunk(chunk, side, own, factors)
        for chunk, (side, factors, _), own in zip(chunks, keys, values, strict=True)
    ]
    return Stacked(done, [made for _, _, made in keys], stack.peak_bytes)


def _packed_keys(
    coding: Coding,
    quantizer: Quantizer,
    jobs: Sequence[Job],
    stack: _Stack,
    *,
    scale: float,
    columns: bool,
) -> list[_Keys]:
    """Of each layer: its keys, the factors of the correction, the columns of their noise."""
    chunks, correction = [job.chunk for job in jobs], coding.correction
    rows = stack.rows([chunk.keys for chunk in chunks])
    keys = _encoded(quantizer, coding.seed, "key", rows, jobs, stack)
    whole = stack.even or getattr(correction, "blank_terms", False)
    factors: Tensor | None = None
    made: ChunkColumns | None = None
    if correction is not None and whole:
        wanted = reads_queries(correction)
        queries = stack.joined([c.queries for c in chunks]) if wanted else None
        factors = correction.fit(keys, rows, queries, scale=scale)
        made = _columns(correction, keys, factors, rows) if columns else None
    found: list[_Keys] = []
    parts = stack.split((keys, factors, made))
    for number, (chunk, (own, fit, known)) in enumerate(zip(chunks, parts, strict=True)):
        if correction is not None and not whole:
            fit = correction.fit(own, chunk.keys, chunk.queries, scale=scale)
        found.append((own, fit, known if stack.like_all(number) else None))
    return found


def _columns(
    correction: Correction, keys: Packed, factors: Tensor | None, rows: Tensor
) -> ChunkColumns | None:
    """Of all layers at once: a read would make them layer by layer."""
    batch, heads, tokens, size = rows.shape
    noise = correction.noise(keys, factors)
    return chunk_columns(noise, tokens=tokens, shape=(batch, heads, size), dtype=rows.dtype)


def _chunk(
    dense: DenseChunk, keys: Packed | None, values: Packed | None, factors: Tensor | None
) -> PackedChunk:
    return PackedChunk(
        dense.ordinal,
        dense.start,
        dense.tokens,
        dense.keys if keys is None else keys,
        dense.values if values is None else values,
        factors,
    )


def _encoded(
    quantizer: Quantizer,
    seed: int,
    role: Role,
    rows: Tensor,
    jobs: Sequence[Job],
    stack: _Stack,
) -> Packed:
    """One side of all jobs."""
    before = [_before(job, role) for job in jobs]
    looked_at = before if _may_differ(before[0]) else ()
    if any(not hasattr(part, "fields_apart") for part in _set_by_data(looked_at)):
        raise _Unlike  # so would this chunk, most likely
    # Where nobody looks at its tensors, the first layer's says of which kind the one before was.
    looks = getattr(quantizer, "reads_previous", True)
    previous = stack.joined(before) if looks else before[0]
    moment = None
    if jobs[0].moment is not None and reads_queries(quantizer):
        moment = stack.joined([None if job.moment is None else job.moment.mean for job in jobs])
    packed = quantizer.encode(
        rows,
        EncodeContext(
            layer=jobs[0].layer,
            role=role,
            seed=seed,
            query_moment=moment,
            query_count=0 if jobs[0].moment is None else jobs[0].moment.count,
            previous=previous,
        ),
    )
    stack.set_apart(packed)
    return packed


def _before(job: Job, role: Role) -> Packed | None:
    if job.previous is None:
        return None
    side = job.previous.keys if role == "key" else job.previous.values
    return None if isinstance(side, Tensor) else side


def _may_differ(holder: Any) -> bool:
    """Whether a chunk has parts whose format numbers can set: chunks of the same classes have them
    too (those of others are found to be unlike)."""
    return hasattr(holder, "format_by_data") or any(map(_may_differ, _inner(holder)))


def _set_by_data(holder: Any) -> Iterator[Any]:
    """A chunk and its parts, those whose format other layers' numbers may have set."""
    if getattr(holder, "format_by_data", False):
        yield holder
    for part in _inner(holder):
        yield from _set_by_data(part)


def _inner(holder: Any) -> list[Any]:
    """What a dataclass, tuple or list holds, but for tensors and plain values."""
    names = _fields(holder)
    if names is not None:
        found: Iterable[Any] = [getattr(holder, name) for name in names]
    else:
        found = holder if isinstance(holder, (tuple, list)) else ()
    return [part for part in found if type(part) not in _LEAVES]


class _Stack:
    """Joins what ``count`` layers of ``batch`` rows hold, and splits what was made of it."""

    def __init__(self, count: int, batch: int) -> None:
        self.count = count
        self.batch = batch
        self._joined_bytes = self._rows_bytes = self._side_bytes = 0
        self._whole: dict[tuple[int, ...], Tensor] = {}
        self._parts: dict[int, list[Tensor]] = {}
        self._apart: dict[int, tuple[Any, list[dict[str, Any]]]] = {}

    @property
    def peak_bytes(self) -> int:
        """Of everything joined, and of the rows of a side with what was packed of them: one side
        is let go after the other."""
        return self._joined_bytes + self._side_bytes

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """The rows of all of the next side, of which nothing is kept here."""
        self._check(tensors)
        self._apart = {}  # of the side before
        whole = _cat(tensors)
        self._rows_bytes = whole.nbytes
        return whole

    @property
    def even(self) -> bool:
        """Whether all layers have the same plain fields."""
        return all(each.count(each[0]) == len(each) for _, each in self._apart.values())

    def like_all(self, number: int) -> bool:
        """Whether that layer has the plain fields of all together."""
        return all(
            getattr(part, name) == item
            for part, each in self._apart.values()
            for name, item in each[number].items()
        )

    def set_apart(self, packed: Packed) -> None:
        """Look up the plain fields that each layer would have alone, of what was packed here."""
        for part in _set_by_data(packed):
            fields = part.fields_apart(self.count) if hasattr(part, "fields_apart") else None
            if fields is None:
                raise _Unlike
            self._apart[id(part)] = part, fields

    def joined(self, holders: Sequence[T]) -> T:
        """One holder (dataclasses, tuples, tensors) with the rows of all, layer by layer."""
        return self._visit(holders)

    def split(self, holder: T) -> list[T]:
        """Each layer's rows in storages of its own, of what was made of a side; what was joined
        comes apart as it came, so that chunks go on sharing tensors."""
        parts = dict(self._parts)
        new = {id(t): t for t in walk_tensors(holder) if id(t) not in parts}
        made_bytes = held_bytes(list(new.values()))
        self._side_bytes = max(self._side_bytes, self._rows_bytes + made_bytes)
        parts |= self._copied(new.values())
        return self._filled(holder, parts)

    def _visit(self, holders: Sequence[Any]) -> Any:
        first = holders[0]
        if any(type(other) is not type(first) for other in holders):
            raise _Unlike
        if isinstance(first, Tensor):
            return self._tensors(holders)
        names = _fields(first)
        if names is not None:
            free = getattr(first, "fields_by_data", ())
            found = {n: self._field(n, holders) for n in names if n not in free}
            return _with(first, found)
        if isinstance(first, (tuple, list)):
            if any(len(other) != len(first) for other in holders):
                raise _Unlike
            return type(first)(self._visit(items) for items in zip(*holders, strict=True))
        if isinstance(first, dict):
            if any(other.keys() != first.keys() for other in holders):
                raise _Unlike
            return {k: self._visit([held[k] for held in holders]) for k in first}
        if any(other is not first and other != first for other in holders):
            raise _Unlike
        return first

    def _field(self, name: str, holders: Sequence[Any]) -> Any:
        found = self._visit([getattr(holder, name) for holder in holders])
        if name == "shape" and isinstance(found, tuple) and found[0] == self.batch:
            return (self.count * self.batch, *found[1:])
        return found

    def _check(self, tensors: Sequence[Tensor]) -> None:
        first = tensors[0]
        if first.ndim == 0 or first.shape[0] != self.batch:
            raise _Unlike
        if any((t.shape, t.dtype, t.device) != (first.shape, first.dtype, first.device)
               for t in tensors):  # fmt: skip
            raise _Unlike

    def _tensors(self, tensors: Sequence[Tensor]) -> Tensor:
        self._check(tensors)
        key = tuple(id(tensor) for tensor in tensors)
        if key not in self._whole:
            whole = _cat(tensors)
            self._joined_bytes += whole.nbytes
            self._whole[key] = whole  # which stays alive, and so do the numbers by which it goes
            self._parts[id(whole)] = list(tensors)
        return self._whole[key]

    def _copied(self, tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
        """Copies by layer of tensors with the rows of all; one launch for many of a dtype."""
        alike: dict[torch.dtype, list[tuple[Tensor, tuple[Tensor, ...]]]] = {}
        for tensor in tensors:
            if tensor.ndim == 0 or tensor.shape[0] != self.count * self.batch:
                raise _Unlike
            whole = _multiplied(tensor.contiguous())
            alike.setdefault(whole.dtype, []).append((tensor, whole.chunk(self.count)))
        found: dict[int, list[Tensor]] = {}
        for held in alike.values():
            # Times one: new tensors that PyTorch makes, some hundred calls less from here.
            copies = iter(torch._foreach_mul([part for _, parts in held for part in parts], 1))
            for tensor, parts in held:
                own = [next(copies) for _ in parts]
                if own[0].dtype != tensor.dtype:
                    own = [copy.view(tensor.dtype) for copy in own]
                found[id(tensor)] = own
        return found

    def _each(self, holder: Any, parts: dict[int, list[Tensor]]) -> list[Any] | None:
        """Of every layer; None for what all have in common."""
        if isinstance(holder, Tensor):
            return parts[id(holder)]
        names = _fields(holder)
        if names is not None:
            return self._each_of(holder, names, parts)
        if isinstance(holder, (tuple, list)):
            columns = [self._filled(item, parts) for item in holder]
            return [type(holder)(items) for items in zip(*columns, strict=True)] or None
        if isinstance(holder, dict):
            columns = [self._filled(item, parts) for item in holder.values()]
            made = [dict(zip(holder, items, strict=True)) for items in zip(*columns, strict=True)]
            return made or None
        return None

    def _each_of(
        self, holder: Any, names: tuple[str, ...], parts: dict[int, list[Tensor]]
    ) -> list[Any] | None:
        """The same of a dataclass."""
        _, apart = self._apart.get(id(holder), (None, None))
        alike = {name: getattr(holder, name) for name in names}
        found = {name: self._each(item, parts) for name, item in alike.items()}
        unlike = {name: items for name, items in found.items() if items is not None}
        if isinstance(alike.get("shape"), tuple):
            unlike["shape"] = [(self.batch, *alike["shape"][1:])] * self.count
        if not unlike and apart is None:
            return None
        made = []
        for number in range(self.count):
            own = {name: items[number] for name, items in unlike.items()}
            own |= {} if apart is None else apart[number]
            made.append(type(holder)(**(alike | own)))
        return made

    def _filled(self, holder: Any, parts: dict[int, list[Tensor]]) -> list[Any]:
        found = self._each(holder, parts)
        return [holder] * self.count if found is None else found


def _fields(holder: Any) -> tuple[str, ...] | None:
    """Names of what a dataclass is made from; None for anything else."""
    kind: Any = type(holder)
    return _names(kind) if hasattr(kind, "__dataclass_fields__") else None


@functools.lru_cache(maxsize=64)
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


def _with(holder: Any, fields: dict[str, Any]) -> Any:
    """The holder with other fields; itself where none is another object."""
    changed = {name: item for name, item in fields.items() if item is not getattr(holder, name)}
    return dataclasses.replace(holder, **changed) if changed else holder


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    """One after the other along the batch; one-byte floats go through their bytes."""
    dtype = tensors[0].dtype
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(dtype)
    return torch.cat(list(tensors))


def _multiplied(tensor: Tensor) -> Tensor:
    """As numbers whose bits a product with one keeps: floats of one byte, and bool, as bytes."""
    narrow = tensor.dtype.itemsize == 1 and tensor.dtype not in (torch.uint8, torch.int8)
    return tensor.view(torch.uint8) if narrow else tensor


def _kind(layer: LayerCache) -> Hashable:
    """Layers for which it is equal pack the same chunks, of the same shapes, at a commit."""
    state = layer.state
    layout, tail, waiting = state.layout, state.tail, state.open
    rows = [
        None if part is None else (part.start, part.tokens, _shape(part.queries))
        for part in (tail, waiting)
    ]
    chunks = tuple(
        (type(chunk), chunk.ordinal, chunk.start, chunk.tokens, _dense_facts(chunk))
        for chunk in state.chunks
    )
    moment = None if state.moment is None else state.moment.count
    looks = None if layout is None else tuple(vars(layout).values())
    return (looks, state.length, state.next_ordinal, tuple(rows), chunks, moment)


def _dense_facts(chunk: DenseChunk | PackedChunk) -> Hashable:
    return (chunk.pinned, _shape(chunk.queries)) if isinstance(chunk, DenseChunk) else None


def _shape(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else tuple(tensor.shape)


def _most(layer: LayerCache, end: int, room_bytes: int | None) -> int:
    """How many layers like this one may be packed together, at least 1."""
    coding, state = layer.coding, layer.state
    layout = state.layout
    if layout is None or layout.device.type not in STACKED_ON or not _stackable(coding):
        return 1
    fresh = end - state.length
    read_bytes = _read_bytes(layer, fresh)
    room = read_bytes if room_bytes is None else min(read_bytes, room_bytes)
    heads = MOST_HEADS // (layout.batch * layout.kv_heads)
    return max(1, min(room // max(1, _stack_bytes(layer, fresh)), heads))


def _read_bytes(layer: LayerCache, fresh: int) -> int:
    """What the layer's last read took: all visible rows in one buffer, queries with their columns,
    outputs (of as many heads as keys have, at least)."""
    layout = layer.state.layout
    assert layout is not None
    columns = 0 if layer.coding.correction is None else layout.row_bytes(SPARE_CHANNELS)
    row_bytes = layout.token_bytes() + columns
    return row_bytes * (layer.visible_tokens + fresh) + row_bytes * fresh


def _stack_bytes(layer: LayerCache, fresh: int) -> int:
    """At most what a layer adds to the copies of its group (rows of one side, queries, moment, the
    chunk before) and to what is packed of that side."""
    coding, state = layer.coding, layer.state
    assert state.layout is not None and state.tail is not None
    waiting = [c.tokens for c in state.chunks if isinstance(c, DenseChunk) and not c.pinned]
    tokens = max([coding.policy.chunk_tokens or fresh, *waiting])
    sides = ((coding.keys, state.layout.key_dim), (coding.values, state.layout.value_dim))
    widest = max(size for quantizer, size in sides if quantizer is not None)
    size_bytes = tokens * state.layout.row_bytes(widest)
    if state.tail.queries is not None and reads_queries(coding.correction):
        size_bytes += state.tail.queries[:, :, :SAMPLED_QUERIES].nbytes
    if state.moment is not None:
        size_bytes += state.moment.mean.nbytes
    before = [c for c in state.chunks if isinstance(c, PackedChunk)][-1:]
    for chunk in before:
        for quantizer, side in ((coding.keys, chunk.keys), (coding.values, chunk.values)):
            if quantizer is not None and getattr(quantizer, "reads_previous", True):
                size_bytes += held_bytes(side)
    return size_bytes + _packed_bytes(layer, tokens, before)


def _packed_bytes(layer: LayerCache, tokens: int, before: Sequence[PackedChunk]) -> int:
    """What packing the larger side of a chunk gives, keys with the columns of their noise: as much
    a token as the one before took; the first is taken for dense."""
    layout = layer.state.layout
    assert layout is not None
    if not before:
        return tokens * layout.row_bytes(max(layout.key_dim, layout.value_dim))
    (chunk,) = before
    keys_bytes, values_bytes = (
        0 if isinstance(side, Tensor) else -(-held_bytes(side, more) * tokens // chunk.tokens)
        for side, more in ((chunk.keys, chunk.factors), (chunk.values, None))
    )
    if layer.keeps_columns:
        held = sum(c.tokens for c in layer.state.chunks if isinstance(c, PackedChunk))
        keys_bytes += -(-layer.noise_bytes * tokens // held)
    return max(keys_bytes, values_bytes)


def _stackable(coding: Coding) -> bool:
    methods = (coding.keys, coding.values, coding.correction)
    return not coding.dense and all(
        method is None or getattr(method, "stackable", False) for method in methods
    )
