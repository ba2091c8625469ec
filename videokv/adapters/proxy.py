"""Installer for models that keep their cache in preallocated buffers, one dict a layer.

    kv_cache[layer]["k"][:, a:b] = rows            a Buffer: rows go to the store
    kv_cache[layer]["k"][:, c:d] = kv[...].clone() a View of it: rows are re-labelled
    attention(q, kv["k"][:, a:b], kv["v"][:, a:b]) the module's function, patched: reads the store

``Buffer`` and ``View`` look like the tensors ``[B, rows, H, D]`` they stand for as far as such
models go; anything else is refused, naming the operation. The model's ``forward`` is wrapped to
put buffers in the place of tensors and to tell the store when a pass begins and ends.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from videokv.adapters import NewCache
from videokv.adapters.methods import Patches
from videokv.adapters.rotary import rotated
from videokv.adapters.rows import Piece, Pieces, cut, laid_over, length
from videokv.adapters.served import Served, heads_of
from videokv.adapters.store import Side, Store, StoredLayer

KEYS: dict[str, Side] = {"k": "key", "v": "value"}
PLAIN_ATTENTION = {
    "q_lens": None,
    "k_lens": None,
    "dropout_p": 0.0,
    "q_scale": None,
    "causal": False,
    "window_size": (-1, -1),
}


class View:
    """Some rows of a layer's buffer, ``[B, rows, H, D]``."""

    def __init__(self, layer: StoredLayer, side: Side, like: Like, pieces: Pieces) -> None:
        self._layer = layer
        self._side = side
        self._like = like
        self._own = pieces

    @property
    def pieces(self) -> Pieces:
        return self._own

    @property
    def shape(self) -> torch.Size:
        like = self._like
        return torch.Size((like.batch, length(self.pieces), like.heads, like.size))

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def ndim(self) -> int:
        return 4

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def clone(self) -> View:
        """A view that can be written to without touching the cache."""
        return View(self._layer, self._side, self._like, self.pieces)

    def contiguous(self) -> View:
        return self

    def type_as(self, other: Any) -> View:
        if other.dtype != self.dtype:
            raise self._refusal(f"a cast to {other.dtype}")
        return self

    def materialise(self) -> Tensor:
        """The rows as a tensor: cached ones decoded, unwritten ones zero."""
        if all(piece.empty for piece in self.pieces):
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self._layer.dense(self._side, self.pieces)

    def __getitem__(self, index: Any) -> View:
        first, last = self._rows(index)
        return View(self._layer, self._side, self._like, cut(self.pieces, first, last))

    def __setitem__(self, index: Any, value: Any) -> None:
        first, last = self._rows(index)
        self._own = laid_over(self._own, first, self._assigned(value, last - first))

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        parts = args[0] if args else kwargs.get("tensors")
        owner = next(part for part in _flat(args) if isinstance(part, View))
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if function not in (torch.cat, torch.concat) or dim not in (1, -3):
            raise owner._refusal(f"torch.{getattr(function, '__name__', function)}")
        assert parts is not None
        pieces = [
            piece
            for part in parts
            for piece in (
                part._of(owner) if isinstance(part, View) else (Piece(part.shape[1], dense=part),)
            )
        ]
        return View(owner._layer, owner._side, owner._like, tuple(p for p in pieces if p.count))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"videokv's stand-in for a cache buffer has no {name!r}; this version of the model's "
            "code uses its cache in a way that is not supported"
        )

    def _of(self, owner: View) -> Pieces:
        if self._layer is not owner._layer or self._side != owner._side:
            raise self._refusal("mixing rows of two layers, or of keys and values,")
        return self.pieces

    def _assigned(self, value: Any, count: int) -> Pieces:
        """What is assigned to ``count`` rows, as pieces."""
        if isinstance(value, View):
            pieces = value._of(self)
        elif isinstance(value, Tensor) and value.ndim == 4:
            pieces = (Piece(value.shape[1], dense=value.to(self.dtype)),)
        else:
            raise self._refusal(f"assigning {type(value).__name__}")
        if length(pieces) != count:
            raise ValueError(
                f"layer {self._layer.index}: {length(pieces)} rows were assigned to {count} rows "
                f"of a buffer of {self._layer.rows}; the buffer is too small for what the model "
                "writes: give it more rows or a smaller window"
            )
        return pieces

    def _rows(self, index: Any) -> tuple[int, int]:
        """(first, last) of ``[:, a:b]``."""
        plain = (
            isinstance(index, tuple)
            and len(index) == 2
            and index[0] == slice(None)
            and isinstance(index[1], slice)
            and index[1].step in (None, 1)
        )
        if not plain:
            raise self._refusal(f"the index {index!r}")
        first, last, _ = index[1].indices(length(self.pieces))
        return first, max(first, last)

    def _refusal(self, what: str) -> ValueError:
        return ValueError(
            f"layer {self._layer.index}: {what} on the cache's {self._side}s is not supported; "
            "videokv serves [:, a:b] reads and writes, clone, cat over rows and attention"
        )


class Buffer(View):
    """All rows of one side of a layer; what is assigned to it goes to the store."""

    @property
    def pieces(self) -> Pieces:
        return self._layer.pieces[self._side]

    def __setitem__(self, index: Any, value: Any) -> None:
        first, last = self._rows(index)
        pieces = self._assigned(value, last - first)
        if not pieces:
            return
        if isinstance(value, View) and all(piece.dense is None for piece in pieces):
            self._layer.move(self._side, first, pieces)
        elif isinstance(value, Tensor):
            self._layer.put(self._side, first, value.to(self.dtype))
        else:
            raise self._refusal("assigning rows that were changed in a clone")

    def zero_(self) -> Buffer:
        """The model empties its cache."""
        if self._side == "key" and self._layer.index == min(self._layer.store.layers):
            self._layer.store.rebuild()
        return self


@dataclasses.dataclass(frozen=True)
class Like:
    """What a buffer looks like, its rows aside."""

    batch: int
    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device


class CacheDict(dict):
    """A layer's dict; unlike a dict it can be held weakly, and so be found again on exit."""


def sink_of_attention(model: Any, frames: int) -> int:
    """Chunks of ``frames`` latent frames that hold the sink of the model's self-attention."""
    blocks = getattr(model, "blocks", None)
    sink = getattr(getattr(blocks[0], "self_attn", None), "sink_size", 0) if blocks else 0
    return -(-int(sink) // int(frames))


def never(model: Any) -> bool:
    """Keys are cached after rotary embedding."""
    return False


def no_check(model: Any) -> None:
    """Every model of the class is served."""


@dataclasses.dataclass(frozen=True)
class ProxyAdapter:
    """A model with buffers. Files of models hold only these names and rules.

    name: in messages. model_class: (end of the module's name, class). marks: parameters of the
    model's methods and names in its module that only this model has; lacks: those it must not have.
    attention, rope: names in the model's module; rope is given where keys are read before rotary
    embedding. snapshot: the history is re-encoded for every chunk. query_from: a function of the
    module called with the queries ``[B, H, M, D]`` of a pass that does not read the cache.
    pre_rope: a test of the model, whether keys are cached before rotary embedding. sink_chunks:
    from the model and the frames of a chunk, how many first chunks it never evicts. check:
    refuses models whose options are not served.
    """

    name: str
    model_class: tuple[tuple[str, str], ...]
    marks: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    attention: str = "attention"
    rope: str | None = None
    snapshot: bool = False
    query_from: str | None = None
    pre_rope: Callable[[Any], bool] = never
    sink_chunks: Callable[[Any, int], int] = sink_of_attention
    check: Callable[[Any], None] = no_check

    def matches(self, model: Any) -> bool:
        return self._model_in(model) is not None

    def served(self, model: Any) -> Served:
        inner = self._model_in(model)
        assert inner is not None
        self.check(inner)
        attentions = [getattr(block, "self_attn", None) for block in getattr(inner, "blocks", ())]
        heads = heads_of(attentions, size="head_dim", count="num_heads")
        return Served(heads, own_window=True, turned_later=self.pre_rope(inner))

    def install(self, model: Any, new_cache: NewCache) -> Callable[[], None]:
        inner = self._model_in(model)
        assert inner is not None
        return Installation(self, model, inner, new_cache).undo

    def _model_in(self, model: Any) -> Any | None:
        for candidate in inner_models(model):
            cls = type(candidate)
            known = any(
                cls.__module__.endswith(module) and cls.__name__ == name
                for module, name in self.model_class
            )
            if known and self._marked(candidate):
                return candidate
        return None

    def _marked(self, model: Any) -> bool:
        names = names_of(model)
        return all(mark in names for mark in self.marks) and not names & set(self.lacks)


def inner_models(model: Any) -> list[Any]:
    """A model, or where pipelines and wrappers of these repositories keep theirs."""
    found: list[Any] = []
    queue = [model]
    while queue and len(found) < 16:
        item = queue.pop(0)
        if any(item is known for known in found):
            continue
        found.append(item)
        for name in ("generator", "model", "transformer", "dit", "pipe", "pipeline"):
            inner = getattr(item, name, None)
            if inner is not None and not inspect.isroutine(inner) and not isinstance(inner, str):
                queue.append(inner)
    return found


def names_of(model: Any) -> set[str]:
    """Parameters of the model's forward methods, its methods, and names in its module."""
    names = set(vars(sys.modules[type(model).__module__])) | set(dir(type(model)))
    for method in ("forward", "_forward_inference"):
        function = getattr(type(model), method, None)
        if function is not None:
            names |= set(inspect.signature(function).parameters)
    return names


class Installation:
    """One model inside ``compress``: its patches and the stores of its guidance branches."""

    def __init__(self, rules: ProxyAdapter, outer: Any, model: Any, new_cache: NewCache) -> None:
        self.rules = rules
        self.outer = outer
        self.model = model
        self.new_cache = new_cache
        self.stores = Slots()
        self.dicts: list[weakref.ref[CacheDict]] = []
        self.active: Store | None = None
        self.unturned: Tensor | None = None
        self.patches = Patches()
        self._patch()

    def _patch(self) -> None:
        module = sys.modules[type(self.model).__module__]
        for name in (self.rules.attention, self.rules.rope, self.rules.query_from):
            if name is not None and not callable(getattr(module, name, None)):
                raise ValueError(
                    f"{self.rules.name}: {module.__name__} has no function {name!r}; this version "
                    "of the repository is not supported"
                )
        patch = self.patches.wrap
        patch(self.model, "forward", self._forward)
        patch(module, self.rules.attention, self._attention)
        if self.rules.rope is not None:
            patch(module, self.rules.rope, self._rope)
        if self.rules.query_from is not None:
            patch(module, self.rules.query_from, self._note_query)
        if callable(getattr(self.outer, "_initialize_kv_cache", None)):
            patch(self.outer, "_initialize_kv_cache", self._initialize)

    def undo(self) -> None:
        """Everything as it was; buffers still held by the model become tensors again."""
        self.patches.undo()
        alive = [held for ref in self.dicts if (held := ref()) is not None]
        for held in alive:
            for key in KEYS:
                if isinstance(held.get(key), Buffer):
                    held[key] = held[key].materialise()

    def _forward(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        given = self._arguments(original, args, kwargs)
        cache = given.get("kv_cache")
        if cache is None:
            return original(*args, **kwargs)
        store = self._store_of(cache, given)
        store.advance(_integer(given.get("current_start")))
        before, self.active = self.active, store
        try:
            output = original(*args, **kwargs)
            store.settle()
        finally:
            self.active, self.unturned = before, None
        return output

    def _arguments(self, original: Callable, args: Any, kwargs: Any) -> dict[str, Any]:
        """By name; forward(*args, **kwargs) hands on to ``_forward_inference``."""
        for function in (original, getattr(self.model, "_forward_inference", None)):
            if function is not None and "kv_cache" in inspect.signature(function).parameters:
                bound = inspect.signature(function).bind_partial(*args, **kwargs)
                return dict(bound.arguments)
        return kwargs

    def _store_of(self, cache: list, given: dict[str, Any]) -> Store:
        first = cache[0]["k"]
        if not isinstance(first, Buffer):
            self._adopt(cache, given)
            first = cache[0]["k"]
        return first._layer.store

    def _adopt(self, cache: list, given: dict[str, Any]) -> None:
        """Buffers in the place of a cache's tensors, whose rows are not written yet."""
        frames = given.get("x")
        frames = None if frames is None else frames[0]  # [C, F, H, W] of the first batch row
        sink = self.rules.sink_chunks(self.model, 1 if frames is None else frames.shape[1])
        branch = self.stores.free()
        make = functools.partial(self.new_cache, branch=branch, layers=len(cache), sink_chunks=sink)
        store = Store(make, snapshot=self.rules.snapshot)
        self.stores.take(branch, store)
        self.dicts = [ref for ref in self.dicts if ref() is not None]
        for index, tensors in enumerate(cache):
            held = cache[index] = CacheDict(tensors)
            self.dicts.append(weakref.ref(held))
            for key, side in KEYS.items():
                held[key] = self._buffer(store, index, side, held[key], frames)

    def _buffer(
        self, store: Store, index: int, side: Side, rows: Any, frames: Tensor | None
    ) -> Buffer:
        if not isinstance(rows, Tensor) or rows.ndim != 4:
            raise ValueError(
                f"{self.rules.name}, layer {index}: expected a cache tensor [B, rows, H, D], got "
                f"{type(rows).__name__}; a cache that is quantized already cannot be compressed"
            )
        batch, count, heads, size = rows.shape
        device = frames.device if rows.is_meta and frames is not None else rows.device
        like = Like(batch, heads, size, rows.dtype, device)
        return Buffer(store.layer(index, rows=count), side, like, ())

    def _initialize(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """A pipeline allocates its cache: no memory is taken for the rows."""
        with NoRows():
            return original(*args, **kwargs)

    def _attention(self, original: Callable, q: Any, k: Any, v: Any, *args: Any, **kw: Any) -> Any:
        if not isinstance(k, View):
            return original(q, k, v, *args, **kw)
        given = inspect.signature(original).bind(q, k, v, *args, **kw).arguments | kw
        scale = _attention_scale(given, layer=k._layer.index)
        values = v.pieces if isinstance(v, View) else (Piece(v.shape[1], dense=v),)
        query = q.to(k.dtype)
        basis = query
        if self.rules.pre_rope(self.model):
            raw, self.unturned = self.unturned, None
            basis = None if raw is None or raw.shape != q.shape else raw.to(k.dtype)
        output = k._layer.attend(query, k.pieces, values, scale=scale, key_query=basis)
        return output.to(q.dtype)

    def _rope(self, original: Callable, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Keys cached before rotary embedding: decoded, rotated by the model's own function.

        The queries that go through it are remembered: as they come, they are in the keys' basis.
        """
        if not isinstance(x, View):
            self.unturned = x if self.active is not None else None
            return original(x, *args, **kwargs)
        cache, layer = x._layer.store.cache, x._layer.index
        pieces = rotated(cache, layer, x.pieces, lambda rows: original(rows, *args, **kwargs))
        return View(x._layer, x._side, x._like, pieces)

    def _note_query(self, original: Callable, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.active is not None:
            for layer in self.active.layers.values():
                layer.settle(query.transpose(1, 2))
        return original(query, *args, **kwargs)


class Slots:
    """Names of guidance branches: each live store has one, freed with it."""

    def __init__(self) -> None:
        self._stores: dict[str, weakref.ref[Any]] = {}

    def free(self) -> str:
        """The first name that no live store has: "", "1", "2"..."""
        number = 0
        while (ref := self._stores.get(_slot(number))) is not None and ref() is not None:
            number += 1
        return _slot(number)

    def take(self, branch: str, store: Any) -> None:
        self._stores[branch] = weakref.ref(store)


def _slot(number: int) -> str:
    return str(number) if number else ""


class NoRows(TorchFunctionMode):
    """Inside it, ``torch.zeros`` of four dimensions makes a tensor without memory."""

    def __torch_function__(
        self, function: Callable, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        shape = args[0] if args and isinstance(args[0], (list, tuple, torch.Size)) else args
        if function is torch.zeros and len(shape or kwargs.get("size", ())) == 4:
            kwargs["device"] = torch.device("meta")
        return function(*args, **kwargs)


def _attention_scale(given: dict[str, Any], *, layer: int) -> float | None:
    """The softmax scale of a call; whatever would be ignored is refused."""
    for option, plain in PLAIN_ATTENTION.items():
        value = given.get(option, plain)
        if value != plain:
            raise ValueError(f"layer {layer}: attention with {option} = {value!r} is not supported")
    scale = given.get("softmax_scale")
    return None if scale is None else float(scale)


def _integer(value: Any) -> int | None:
    return None if value is None else int(value)


def _flat(args: Any) -> Iterator[Any]:
    for item in args:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item
