"""The cache of all layers: write, commit, attend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Real
from typing import Protocol

import torch
from torch import Tensor

from videokv.cache.chunks import Job, PackedChunk, sliced
from videokv.cache.few import attend_all, current_rows, packed_calls
from videokv.cache.graphs import outside_graphs
from videokv.cache.layer import LayerCache
from videokv.cache.mass import Mass, MassCall, cached_mass, summary
from videokv.cache.memory import Memory, measured
from videokv.cache.policy import CachePolicy, is_count
from videokv.cache.rows import worth_gathering
from videokv.cache.stacking import groups, packed_together
from videokv.cache.state import Coding, LayerState
from videokv.cache.workspace import Workspace
from videokv.kernels.reconstruct import Rope
from videokv.noise import ScoreNoise
from videokv.protocols import NARROW_BACKEND, Correction, Quantizer, Role, Segment

# Backends that read the correction as columns: on a GPU the noise of packed chunks is made once a
# chunk, in the dtype of the columns. (Where "auto" falls back to the oracle, it sees that too.)
COLUMN_BACKENDS = ("auto", "sdpa", "triton", NARROW_BACKEND)
OWN_BACKEND = "triton"  # reads the current rows where they lie
_AS_IT_IS = nullcontext()


class CacheRecipe(Protocol):
    """What a cache asks of a recipe (``videokv.Recipe`` is one)."""

    @property
    def name(self) -> str: ...
    @property
    def keys(self) -> Quantizer | None: ...
    @property
    def values(self) -> Quantizer | None: ...
    @property
    def policy(self) -> CachePolicy: ...
    @property
    def seed(self) -> int: ...

    def correction_method(self) -> Correction | None:
        """The correction's object, or None."""
        ...

    def attend(
        self,
        query: Tensor,
        segments: Sequence[Segment],
        *,
        scale: float,
        causal: bool,
        need_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over all segments by the recipe's backend (see ``AttentionBackend``)."""
        ...


@outside_graphs(
    *("write", "commit", "attend", "view", "keep", "forget", "crop", "reset", "select_batch", "to"),
    *("restore", "side", "held_tokens", "memory", "mass", "masses", "length", "visible_tokens"),
)
class KVCache:
    """Keys and values of all layers in the recipe's format.

    A pass through the model calls ``attend`` in each layer; a clean pass calls ``write`` before it,
    and ``commit`` after the last layer. Nothing is committed before that: what is written again
    over the same rows replaces them. Inside ``torch.compile`` every call here is a graph break (see
    ``graphs.py``).

    Args:
        recipe: quantizers, correction, policy and attention (``videokv.recipe(name)``).
        layers: number of layers; None lets layers appear while the first chunk is written.
        scale: softmax scale; None takes the one that ``attend`` was last given, else
            1 / sqrt(head size).
        workspace_bytes: budget of decoded chunks; see ``Workspace``. None: one layer at a time.
        record_mass: also measure the attention mass on cached keys, by one small extra attention
            over the current keys; outputs do not change.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        recipe: CacheRecipe,
        *,
        layers: int | None = None,
        scale: float | None = None,
        workspace_bytes: int | None = None,
        record_mass: bool = False,
    ) -> None:
        if isinstance(recipe, str):
            raise ValueError(f"give a recipe, not its name: videokv.recipe({recipe!r})")
        if layers is not None and (not is_count(layers) or layers < 1):
            raise ValueError(f"layers must be None or a positive integer, got {layers!r}")
        if scale is not None:
            scale = _checked_scale(scale)
        self.recipe = recipe
        self._coding = Coding(
            recipe.keys, recipe.values, recipe.correction_method(), recipe.policy, recipe.seed
        )
        self._fixed_layers = layers
        self._scale = scale
        self._seen_scale: float | None = None
        self._workspace = Workspace(workspace_bytes)
        self._record_mass = record_mass
        self._calls: list[MassCall] = []
        self._layers: dict[int, LayerCache] = {}
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens committed since the start: the position of the next one."""
        return self._length

    @property
    def visible_tokens(self) -> int:
        """Committed tokens still held (``length`` less the dropped ones)."""
        return next((layer.visible_tokens for layer in self._layers.values()), 0)

    @property
    def record_mass(self) -> bool:
        """Whether the attention mass on cached keys is recorded."""
        return self._record_mass

    @property
    def encode_calls(self) -> int:
        """Tensors packed so far, over all layers."""
        return sum(layer.encode_calls for layer in self._layers.values())

    @property
    def decode_calls(self) -> int:
        """Packed tensors decoded so far, over all layers."""
        return sum(layer.decode_calls for layer in self._layers.values())

    @torch.no_grad()
    def write(
        self,
        layer: int,
        start_token: int,
        key: Tensor,
        value: Tensor,
        query: Tensor | None = None,
    ) -> None:
        """Hold rows of tokens ``start_token...`` until the commit, over those written before.

        key ``[B, Hkv, T, D]``, value ``[B, Hkv, T, Dv]``, query ``[B, Hq, T, D]`` in the
        coordinates of the key (needed by corrections that are fitted and by query-aware
        quantizers).

        Raises:
            ValueError: shapes or dtypes disagree, or the rows overlap committed ones or leave a
                gap.
        """
        self._check_index(layer)
        held = self._layers.get(layer) or self._new_layer(layer)
        held.write(start_token, key, value, query)
        self._layers[layer] = held  # a layer that refused its first rows does not appear

    @torch.no_grad()
    def commit(self, end_token: int) -> None:
        """All rows before ``end_token`` are final: pack, drop and free as the policy says.

        Raises:
            ValueError: a layer lacks rows, or rows are not finite (naming the layer). The cache is
                then as it was before.
        """
        if end_token < self._length:
            raise ValueError(
                f"commit({end_token}) lies before the {self._length} tokens already committed"
            )
        if end_token == self._length:
            return
        layers = self._all_layers()
        for layer in layers:
            layer.check_commit(end_token)
        _refuse_infinite(layers, end_token)
        with self._undone_on_error():
            for group in groups(layers, end_token, room_bytes=self._workspace.room()):
                with _full_precision(_device_of(group[0])):
                    self._commit(group, end_token)
        self._length = end_token
        for layer in layers:
            self._workspace.keep_only(layer.index, {c.ordinal for c in layer.state.chunks})

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        *,
        causal: bool = False,
    ) -> Tensor:
        """softmax over everything committed and the current rows, each once.

        query ``[B, Hq, M, D]``, key ``[B, Hkv, N, D]``, value ``[B, Hkv, N, Dv]``: the current
        chunk; rows that were written but not committed are not read from the cache. causal: query
        m sees the current rows up to m only (M = N).

        Returns:
            ``[B, Hq, M, Dv]`` in the query's dtype.

        Raises:
            ValueError: the scale is not positive and finite, or shapes or dtypes disagree. The
                cache is then as it was before.
        """
        given = None if scale is None else _checked_scale(scale)
        output = self._attended(
            layer,
            query,
            key,
            value,
            scale=self._softmax_scale(query.shape[-1]) if given is None else given,
            causal=causal,
        )
        self._seen_scale = self._seen_scale if given is None else given
        return output

    def _attended(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool
    ) -> Tensor:
        current = Segment(key, value)
        self._check_index(layer)
        held = self._layers.get(layer)
        with _full_precision(query.device):
            if held is None or not held.visible_tokens:
                return self.recipe.attend(
                    query, [current], scale=scale, causal=causal, need_lse=False
                )[0]
            _check_current(held, query, key, value)
            output, lse = self._attend_past(held, query, current, scale=scale, causal=causal)
            if self._record_mass:
                assert lse is not None
                self._record(held, query, current, lse, scale=scale, causal=causal)
        return output

    def held_tokens(self, layer: int) -> int:
        """Committed tokens that one layer holds."""
        self._check_index(layer)
        held = self._layers.get(layer)
        return 0 if held is None else held.visible_tokens

    def keep(self, layer: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Drop chunks of a layer that hold no token of ``ranges`` ((start, end) positions).

        For models that move their own window: whole chunks go, nothing is packed again.
        """
        self._layer(layer).keep(ranges)
        self._workspace.keep_only(layer, {c.ordinal for c in self._layers[layer].state.chunks})

    def view(
        self, layer: int, ranges: Sequence[tuple[int, int]] | None = None, *, tail: bool = False
    ) -> list[Segment]:
        """The past of a layer as dense segments in order, with the noise of packed ones.

        ranges: (start, end) token positions to take, in the order given; None: all. tail: rows
        that are written but not committed belong to it too.

        Raises:
            ValueError: a range holds tokens that were dropped or never written.
        """
        self._check_index(layer)
        held = self._layers.get(layer)
        if held is None:
            if ranges:
                raise ValueError(f"layer {layer} is empty; it has no tokens {list(ranges)}")
            return []
        with torch.no_grad(), _full_precision(_device_of(held)):
            needed = held.decoders(ranges)
            found = held.segments(self._workspace.once(layer, needed), tail=tail)
        if ranges is None:
            return [segment for _, segment in found]
        return [part for span in ranges for part in _in_range(found, span, layer)]

    def side(
        self,
        layer: int,
        side: Role,
        span: tuple[int, int],
        *,
        rope: Rope | None = None,
        tail: bool = False,
    ) -> list[tuple[Tensor, tuple[ScoreNoise, ...]]]:
        """Keys or values alone of the tokens ``span[0]..span[1]``, dense and in order.

        rope: turns keys that were cached before rotary embedding, as they are decoded; a row for
        each token of the span. tail: rows that are written but not committed belong to it too.

        Returns:
            Pieces ``[B, Hkv, T, D]``, each with the noise of its keys (before the turn; () for
            values and dense rows).

        Raises:
            ValueError: the span holds tokens that were dropped, never written, or not committed
                (without ``tail``), or rope is given for values.
        """
        if rope is not None and side != "key":
            raise ValueError("rope turns keys; read values without it")
        held = self._layer(layer)
        end = self._length if not tail else max(self._length, held.written_end)
        with torch.no_grad(), _full_precision(_device_of(held)):
            kept = {
                number: seg for (at, number), seg in self._workspace.kept.items() if at == layer
            }
            found = held.one_side(side, span, rope=rope, kept=kept)
        covered = sum(rows.shape[2] for rows, _ in found)
        if span[0] > span[1] or span[1] > end or covered != span[1] - span[0]:
            raise ValueError(
                f"layer {layer} holds {covered} of the tokens {span[0]}..{span[1]}, committed up "
                f"to {self._length}; the rest was dropped or never written"
            )
        self._workspace.note_rows(layer, [Segment(rows, rows[..., :0]) for rows, _ in found])
        return found

    def memory(self) -> Memory:
        """Bytes and bits, counted from the storages that are alive now."""
        return measured(self._layers.values(), workspace_peak_bytes=self._workspace.peak_bytes)

    def mass(self, written: bool | None = None) -> Mass:
        """Mean attention mass on cached keys (needs ``record_mass=True``). Synchronises.

        written: True counts only passes that had written their rows, False only the others
        (denoising), None all.
        """
        calls = self._calls
        return summary([c for c in calls if written is None or c.written == written])

    def masses(self) -> list[tuple[int, int, Tensor]]:
        """(start token of the current chunk, layer, mass ``[B]``) of each denoising attention."""
        if not self._record_mass:
            raise ValueError("no mass was recorded; make the cache with record_mass=True")
        return [(c.start_token, c.layer, c.mass) for c in self._calls if not c.written]

    def reset(self, *, keep_statistics: bool = False) -> None:
        """Empty the cache: tokens, workspace, counters, recorded mass.

        keep_statistics: query moments stay, for models that rebuild their history every chunk.
        """
        old = self._layers
        self._layers = {}
        self._length = 0
        self._calls = []
        self._workspace = Workspace(self._workspace.budget_bytes)
        if keep_statistics:
            for index, layer in old.items():
                state = layer.state
                kept = LayerState(moment=state.moment, layout=state.layout)
                self._layer(index).state = kept

    @torch.no_grad()
    def crop(self, length: int, *, decode_partial: bool = False) -> None:
        """Keep the first ``length`` tokens; negative: drop that many from the end (at most all).

        Longer than the cache: nothing but the tail goes. Rows not committed are dropped; tokens
        that a window dropped do not come back; query statistics stay. Dense chunks are cut
        anywhere, packed ones only between chunks, unless ``decode_partial``: then the first rows
        of the cut chunk are decoded and stay dense.

        Raises:
            ValueError: the cut lies inside a packed chunk, naming the nearest allowed lengths.
        """
        length = max(0, self._length + length if length < 0 else length)
        length = min(length, self._length)
        with self._undone_on_error():
            for layer in self._layers.values():
                with _full_precision(_device_of(layer)):
                    layer.crop(length, decode_partial=decode_partial)
        self._length = length
        self._workspace.clear()

    def forget(self, before_token: int) -> None:
        """Tokens before ``before_token`` are read no more, for models that trim their own history.

        Chunks that end there are freed; of one that is cut the rest is still read, its codes as
        they are. Positions go on counting. At most everything committed is forgotten.

        Raises:
            ValueError: a negative position.
        """
        if before_token < 0:
            raise ValueError(f"before_token must be at least 0, got {before_token}")
        for layer in self._layers.values():
            layer.forget(before_token)
            self._workspace.keep_only(layer.index, {c.ordinal for c in layer.state.chunks})

    @torch.no_grad()
    def select_batch(self, index: Tensor | Sequence[int]) -> None:
        """Keep the batch rows ``index``, in that order, repeats allowed; codes do not change.

        Beam reordering, ``[0, 0, 1, 1]`` to repeat, ``[0, 2]`` to select.
        """
        rows = torch.as_tensor(index)
        if rows.ndim != 1 or rows.numel() == 0 or rows.dtype.is_floating_point:
            raise ValueError(f"index must be a non-empty list of batch rows, got {index!r}")
        if rows.dtype == torch.bool:
            raise ValueError("index must hold row numbers, got a mask; use mask.nonzero().ravel()")
        for layer in self._layers.values():
            batch = layer.state.layout.batch if layer.state.layout else None
            if batch is not None and not 0 <= int(rows.min()) <= int(rows.max()) < batch:
                raise ValueError(f"index must lie in 0..{batch - 1}, got {rows.tolist()}")
        with self._undone_on_error():
            for layer in self._layers.values():
                layer.select_batch(rows.long())
        self._workspace.clear()

    @torch.no_grad()
    def to(self, device: torch.device | str) -> KVCache:
        """Move everything to a device, in place."""
        for layer in self._layers.values():
            layer.to(torch.device(device))
        self._workspace.clear()
        return self

    def options(self) -> dict[str, object]:
        """Arguments that make a cache like this one from its recipe (for saving)."""
        return {"layers": self._fixed_layers, "scale": self._scale or self._seen_scale}

    def layer_states(self) -> dict[int, LayerState]:
        """What each layer remembers (for saving)."""
        return {index: layer.state for index, layer in sorted(self._layers.items())}

    def restore(self, states: dict[int, LayerState], *, length: int) -> None:
        """Take over saved states; the cache is as it was when they were read."""
        self.reset()
        for index, state in states.items():
            self._layer(index).state = state
        self._length = length

    def _layer(self, index: int) -> LayerCache:
        self._check_index(index)
        if index not in self._layers:
            self._layers[index] = self._new_layer(index)
        return self._layers[index]

    def _new_layer(self, index: int) -> LayerCache:
        if self._length:
            raise ValueError(
                f"layer {index} appears after {self._length} tokens were committed without it"
            )
        return LayerCache(index, self._coding)

    def _check_index(self, index: int) -> None:
        count = self._fixed_layers
        if index < 0 or (count is not None and index >= count):
            wanted = "0 or more" if count is None else f"below {count}"
            raise ValueError(f"layer must be {wanted}, got {index}")

    def _all_layers(self) -> list[LayerCache]:
        """Layers that a commit covers: all of them where their number is known."""
        if self._fixed_layers is not None:
            return [self._layer(index) for index in range(self._fixed_layers)]
        if not self._layers:
            raise ValueError("nothing was written; write every layer before the commit")
        return [layer for _, layer in sorted(self._layers.items())]

    def _softmax_scale(self, head_dim: int) -> float:
        return self._scale or self._seen_scale or head_dim**-0.5

    def _commit(self, group: list[LayerCache], end: int) -> None:
        """Commit layers that pack the same chunks, together where there are several."""
        layout = group[0].state.layout
        assert layout is not None
        scale = self._softmax_scale(layout.key_dim)
        commits = [layer.begin_commit(end) for layer in group]
        for place in commits[0].places:
            jobs = [layer.job(each, place) for layer, each in zip(group, commits, strict=True)]
            for each, chunk in zip(commits, self._packed(group, jobs, scale=scale), strict=True):
                each.chunks[place] = chunk
        for layer, each in zip(group, commits, strict=True):
            layer.finish_commit(each)

    def _packed(
        self, group: list[LayerCache], jobs: list[Job], *, scale: float
    ) -> list[PackedChunk]:
        found = None
        if len(jobs) > 1:
            wanted = group[0].keeps_columns
            found = packed_together(self._coding, jobs, scale=scale, columns=wanted)
        if found is None:
            return [layer.packed(job, scale=scale) for layer, job in zip(group, jobs, strict=True)]
        self._workspace.note_stack(found.stack_bytes)
        for layer, chunk, columns in zip(group, found.chunks, found.columns, strict=True):
            layer.packed_elsewhere(chunk, columns)
        return found.chunks

    def _attend_past(
        self, held: LayerCache, query: Tensor, current: Segment, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """One softmax over past and current; in parts where the workspace is smaller than that."""
        if worth_gathering(query.device) and getattr(self.recipe, "backend", None) == "auto":
            found = self._attend_packed(held, query, current, scale=scale, causal=causal)
            if found is not None:
                return found
        if self._workspace.budget_bytes is None and worth_gathering(query.device):
            backend = getattr(self.recipe, "backend", None)
            keep = backend in COLUMN_BACKENDS
            if backend == NARROW_BACKEND:
                segments = held.gathered_narrow(current, keep=keep)
            else:
                segments = held.gathered(current, keep=keep, apart=backend == OWN_BACKEND)
            self._workspace.note_rows(held.index, segments[:-1], noise_bytes=held.noise_bytes)
            return self.recipe.attend(
                query, segments, scale=scale, causal=causal, need_lse=self._record_mass
            )
        parts: list[tuple[Tensor, Tensor]] = []
        blocks = self._workspace.blocks(held.index, held.decoders(), layers=len(self._layers))
        for block, last in blocks:
            if not last:
                parts.append(self._part(query, held.packed_segments(block), scale=scale))
                continue
            segments = [segment for _, segment in held.segments(block)]
            output, lse = self.recipe.attend(
                query,
                [*segments, current],
                scale=scale,
                causal=causal,
                need_lse=self._record_mass or bool(parts),
            )
        if not parts:
            return output, lse
        assert lse is not None
        return _merged([*parts, (output, lse)])

    def _attend_packed(
        self, held: LayerCache, query: Tensor, current: Segment, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Few queries read packed chunks as they are; None where they have to be decoded."""
        state = held.state
        calls = packed_calls(
            query, state.chunks, held.coding.correction, first=state.first, scale=scale
        )
        if calls is None:
            return None
        dense = [segment for _, segment in held.segments({})]
        rows = None if dense else current_rows(calls, current, scale=scale, causal=causal)
        if rows is not None:
            return attend_all(calls, rows)
        output, lse = self.recipe.attend(
            query, [*dense, current], scale=scale, causal=causal, need_lse=True
        )
        assert lse is not None
        return attend_all(calls, (output, lse))

    def _part(
        self, query: Tensor, segments: list[Segment], *, scale: float
    ) -> tuple[Tensor, Tensor]:
        output, lse = self.recipe.attend(query, segments, scale=scale, causal=False, need_lse=True)
        assert lse is not None
        return output, lse

    def _record(
        self,
        held: LayerCache,
        query: Tensor,
        current: Segment,
        lse_total: Tensor,
        *,
        scale: float,
        causal: bool,
    ) -> None:
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"layer {held.index}: replays of a CUDA graph would not be counted in the recorded "
                "mass; capture with record_mass=False"
            )
        with torch.no_grad():
            _, lse = self.recipe.attend(query, [current], scale=scale, causal=causal, need_lse=True)
            assert lse is not None
            mass = cached_mass(lse, lse_total)
        written = held.state.tail is not None
        self._calls.append(MassCall(self._length, held.index, written, mass))

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """All layers change or none does."""
        before = {index: layer.state for index, layer in self._layers.items()}
        try:
            yield
        except BaseException:
            for index, state in before.items():
                self._layers[index].state = state
            raise


def _checked_scale(scale: float) -> float:
    number = isinstance(scale, Real) and not isinstance(scale, bool)
    if not number or not 0 < scale < float("inf"):
        raise ValueError(f"scale must be None, or positive and finite, got {scale!r}")
    return float(scale)


def _full_precision(device: torch.device) -> AbstractContextManager[object]:
    """No autocast inside the cache: it would run the codecs' float32 products in bfloat16."""
    if not torch.is_autocast_enabled(device.type):
        return _AS_IT_IS
    return torch.autocast(device.type, enabled=False)


def _device_of(layer: LayerCache) -> torch.device:
    layout = layer.state.layout
    return torch.device("cpu") if layout is None else layout.device


def _refuse_infinite(layers: list[LayerCache], end: int) -> None:
    """One synchronisation for all layers; the culprit is looked for only if there is one.

    The largest magnitude of a tensor is NaN or infinite where any number of it is: one pass over
    it, without a tensor of flags.
    """
    tensors = [t for layer in layers for t in layer.committing(end) if t.numel()]
    peaks = torch._foreach_norm(tensors, torch.inf)
    if not bool(torch.stack([p.to(peaks[0].device) for p in peaks]).isfinite().all()):
        for layer in layers:
            layer.refuse_infinite(end)


def _check_current(held: LayerCache, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Buffers get the shape of the current rows, and kernels write packed rows into them."""
    layout = held.state.layout
    assert layout is not None
    rows, size = (layout.batch, layout.kv_heads), layout.key_dim
    tokens = key.shape[2:3]
    fits = (
        key.shape == (*rows, *tokens, size)
        and value.shape == (*rows, *tokens, layout.value_dim)
        and query.ndim == 4
        and (query.shape[0], query.shape[3]) == (layout.batch, size)
        and query.shape[1] % layout.kv_heads == 0
    )
    if not fits:
        raise ValueError(
            f"layer {held.index} holds {layout.describe()}; got query {tuple(query.shape)}, key "
            f"{tuple(key.shape)} and value {tuple(value.shape)}: the current rows must be like them"
        )
    if key.dtype != layout.dtype or value.dtype != layout.dtype:
        raise ValueError(
            f"layer {held.index} holds {layout.dtype}; the current keys and values are "
            f"{key.dtype} and {value.dtype}: run the model in one dtype"
        )


def _in_range(found: list[tuple[int, Segment]], span: tuple[int, int], layer: int) -> list[Segment]:
    """The pieces of segments between two token positions, all of which must be there."""
    first, last = span
    parts, covered = [], 0
    for start, segment in found:
        low, high = max(first, start), min(last, start + segment.keys.shape[2])
        if low < high:
            parts.append(sliced(segment, low - start, high - start))
            covered += high - low
    if first > last or covered != last - first:
        raise ValueError(
            f"layer {layer} holds {covered} of the tokens {first}..{last}; the rest was dropped "
            "or never written"
        )
    return parts


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One softmax from partial ones: outputs weighted by exp(lse - total), in float32."""
    total = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    whole = sum(
        output.to(torch.promote_types(output.dtype, torch.float32))
        * torch.exp(lse - total).unsqueeze(-1)
        for output, lse in parts
    )
    assert isinstance(whole, Tensor)
    return whole.to(parts[0][0].dtype), total
