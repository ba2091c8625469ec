"""The cache object that language models of transformers take."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from videokv.adapters.served import Served, check
from videokv.adapters.transformers.attention import NAME
from videokv.adapters.transformers.layers import CompressedLayer, WindowLayer
from videokv.adapters.transformers.models import (
    check_installed,
    check_model,
    heads,
    install,
    uninstall,
)
from videokv.adapters.transformers.padding import PaddedRows
from videokv.cache import KVCache, Mass, Memory
from videokv.recipes import Recipe
from videokv.recipes import recipe as find_recipe
from videokv.tensors import held_bytes

CROPS_TO_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters
DECODE_CHUNK = 128
LONGEST_CHUNK = 512


class CompressedCache(Cache):
    """Cache for ``model(..., past_key_values=cache)`` and ``model.generate``.

    Making one switches the attention of ``model`` to ``"videokv"``; ``close``, the end of a
    ``with`` block or the end of the cache's life switches it back.

    model: a decoder-only transformers model. Layers that attend to everything before them are
        packed. Beside those, layers with a sliding window (Gemma 3, some Qwen) stay dense, at most
        a window each: ``window_layers`` lists them and a warning says so. Where every layer has a
        window (Mistral 7B v0.1, Phi 3 mini), all are packed and the sequence may be as long as the
        window, no longer.
    chunk: tokens that are packed together. Final tokens fill chunks of this size in order, however
        they came (one forward per chunk, one long prompt, or one by one when decoding); those
        that do not fill one yet stay dense. None: as the recipe's policy says, else the length
        of the first forward, at most 512; 128 where that is a single token.
    options: passed to ``Recipe.new_cache`` (``record_mass``, ``window_chunks``,
        ``workspace_bytes``).

    ``copy.deepcopy`` copies the tokens, for the same model.

    Batches padded on the left are served row by row: no pad is stored, and each row is packed as if
    it ran alone. Give the whole attention mask in every forward, as ``generate`` does.

    Refuses (ValueError): layers of other kinds, heads that the recipe cannot encode, padding
    elsewhere, beams over a padded batch, masks of one's own, an attention function that was
    replaced after the cache was made.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: str | Recipe,
        *,
        chunk: int | None = None,
        **options: Any,
    ) -> None:
        chosen = find_recipe(recipe)
        _check_options(options)
        check_model(model)
        check(chosen, Served(heads(model)), name=type(model).__name__)
        new_cache = functools.partial(_new_cache, chosen, options)
        self._prepare(model, new_cache, chunk)

    @classmethod
    def made_by(cls, model: PreTrainedModel, new_cache: Callable[..., KVCache]) -> CompressedCache:
        """One whose storage comes from ``new_cache(layers=..., chunk_tokens=...)``."""
        made = cls.__new__(cls)
        made._prepare(model, new_cache, None)
        return made

    def _prepare(
        self, model: PreTrainedModel, new_cache: Callable[..., KVCache], chunk: int | None
    ) -> None:
        self._plan = check_model(model)
        self._new_cache = new_cache
        self._chosen_chunk = chunk
        self._model = model
        self._windows: dict[int, WindowLayer] = {}
        self.reset()
        super().__init__(layers=[self._layer(i) for i in range(self._plan.count)])
        if self._windows:
            warnings.warn(
                f"layers {self.window_layers} of {type(model).__name__} have a sliding window and "
                "stay dense; the others are packed",
                stacklevel=3,
            )
        self._attach()

    def _layer(self, index: int) -> CompressedLayer | WindowLayer:
        if index not in self._plan.windows:
            return CompressedLayer(self, index)
        self._windows[index] = WindowLayer(self, index, self._plan.windows[index])
        return self._windows[index]

    def _attach(self) -> None:
        install(self._model)
        self._release = weakref.finalize(self, uninstall, weakref.ref(self._model))

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        self._refuse_broken_forward()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(vars(self))
        copied._begun, copied._attended = set(), set()
        copied.kv = copy.deepcopy(self.kv, memo)
        copied._windows = {i: layer.copied(copied, memo) for i, layer in self._windows.items()}
        copied.layers = [
            copied._windows.get(index) or CompressedLayer(copied, index)
            for index in range(self._plan.count)
        ]
        copied._attach()
        return copied

    # -- life -------------------------------------------------------------------------------

    def __enter__(self) -> CompressedCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the model its own attention back (where no other CompressedCache is in use)."""
        self._release()

    def reset(self) -> None:
        """Forget all tokens, and the chunk size that the first forward set."""
        self.kv: KVCache | PaddedRows = self._new_kv(self._chosen_chunk)
        self._length = 0
        self._batch = -1
        self._end_forward()
        for layer in self._windows.values():
            layer.clear()

    # -- tokens -----------------------------------------------------------------------------

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Layers with a sliding window, which stay dense."""
        return tuple(self._plan.windows)

    @property
    def limit(self) -> int | None:
        """The longest sequence, where every layer has a window; else None."""
        return self._plan.limit

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first forward."""
        return self._batch

    def length_of(self, layer: int) -> int:
        """Tokens seen by one layer, those of the running forward included."""
        return self._length + (self._tokens if layer in self._begun else 0)

    def commit(self) -> None:
        """Make the tokens of the last forward final now; whole chunks are packed."""
        self._refuse_broken_forward()
        if self._length > self.kv.length:
            self.kv.commit(self._length)

    def begin(self, layer: int, keys: Tensor) -> None:
        """A forward reached this layer with new keys ``[B, Hkv, T, D]``."""
        check_installed(self._model)
        if layer in self._begun or self._begun != self._attended:
            self._refuse_broken_forward()
        if not self._begun:
            self._begin_forward(keys)
        if keys.shape[2] != self._tokens or keys.shape[0] != self._batch:
            raise ValueError(
                f"layer {layer} got keys of batch {keys.shape[0]} and {keys.shape[2]} tokens, "
                f"the layers before it batch {self._batch} and {self._tokens}: all layers must "
                "see the same tokens"
            )
        if self.limit is not None and self._length + self._tokens > self.limit:
            raise ValueError(
                f"every layer of {type(self._model).__name__} has a window of {self.limit} tokens, "
                f"and CompressedCache serves it up to there; this forward ends at "
                f"{self._length + self._tokens}"
            )
        self._begun.add(layer)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        real: Tensor | None,
        *,
        scale: float,
    ) -> Tensor:
        """Write the rows of this forward and attend; ``[B, Hq, M, Dv]``.

        real: where there is padding, ``[B, 1, 1, T]``, whether a token is no pad.
        """
        start = self._length
        if real is not None or isinstance(self.kv, PaddedRows):
            output = self._rows(real).attend(layer, start, query, key, value, scale=scale)
        else:
            self.kv.write(layer, start, key, value, query)
            output = self.kv.attend(layer, query, key, value, scale=scale, causal=True)
        self.finish(layer)
        return output

    def _rows(self, real: Tensor | None) -> PaddedRows:
        """The caches of a padded batch."""
        if not isinstance(self.kv, PaddedRows):
            if self._length:
                raise ValueError(
                    f"the attention mask has zeros after {self._length} tokens that came without "
                    "padding; pass the mask from the first forward on"
                )
            chunk = self.kv.recipe.policy.chunk_tokens
            self.kv = PaddedRows(lambda row: self._new_kv(chunk, row), self._batch)
        if real is None:
            raise ValueError(
                "this CompressedCache holds a padded batch, the forward brought no attention mask "
                "with its pads: pass the whole mask in every forward"
            )
        self.kv.look(real, start=self._length)
        return self.kv

    def finish(self, layer: int) -> None:
        """The attention of a layer is done; after the last one the tokens are seen."""
        self._attended.add(layer)
        if len(self._attended) == self._plan.count:
            self._length += self._tokens
            self._end_forward()
            for window in self._windows.values():
                window.settle()

    # -- the cache as an object -------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens (a number <= 0).

        In transformers 4, whose own caches do so, a positive number is the length to keep. Also
        drops the tokens of a forward that broke off. More than there are: empties it. Where
        the cut falls inside a packed chunk, its first rows are decoded and stay dense.

        Raises:
            ValueError: a positive number in transformers 5, or a window layer has let go of tokens
                it would need.
        """
        if tokens_to_remove > 0 and CROPS_TO_LENGTH:
            tokens_to_remove = min(0, tokens_to_remove - self._length)
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, got {tokens_to_remove}"
            )
        self._abandon_forward()
        length = max(0, self._length + tokens_to_remove)
        if length == 0:
            self.reset()
            return
        for layer in self._windows.values():
            layer.check_crop(self._length - length)
        for layer in self._windows.values():
            layer.crop(length - self._length)
        if length > self.kv.length:  # rows that stay become final, so that the rest can go
            self.kv.commit(length)
        self.kv.crop(length, decode_partial=True)
        self._length = length

    def activate_past_recording(self) -> None:
        """Let window layers keep more than their window until the next ``crop``, which can then
        cut forwards made in between."""
        for layer in self._windows.values():
            layer.activate_past_recording()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch, in this order; packed chunks are moved, not repacked."""
        self._refuse_broken_forward()
        if self._length:
            self.kv.select_batch(indices)
            for layer in self._windows.values():
                layer.batch_select_indices(indices)
            self._batch = len(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(max(self._batch, 0), device=self._model.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def memory(self) -> Memory:
        """Bytes and bits held (``videokv.cache.memory.Memory``), window layers included."""
        packed = self.kv.memory()
        windows = [held for layer in self._windows.values() if (held := layer.held()) is not None]
        if not windows:
            return packed
        dense = packed.dense_bytes + sum(rows.nbytes for held in windows for rows in held)
        held_all = packed.held_bytes + held_bytes(*windows)
        return replace(packed, dense_bytes=dense, held_bytes=held_all, ratio=dense / held_all)

    def mass(self) -> Mass:
        """Mean attention mass on the tokens before a forward (option ``record_mass=True``)."""
        return self.kv.mass()

    # -- one forward ------------------------------------------------------------------------

    def _new_kv(self, chunk: int | None, row: int = 0) -> KVCache:
        # with window layers, the packed ones appear under their own numbers
        layers = None if self._plan.windows else self._plan.count
        branch = str(row) if row else ""
        return self._new_cache(branch=branch, alone=not row, layers=layers, chunk_tokens=chunk)

    def _end_forward(self) -> None:
        self._begun: set[int] = set()
        self._attended: set[int] = set()
        self._tokens = 0

    def _abandon_forward(self) -> None:
        self._end_forward()
        for layer in self._windows.values():
            layer.abandon()

    def _begin_forward(self, keys: Tensor) -> None:
        batch, _, tokens, _ = keys.shape
        if self._length == 0:
            self._start(tokens)
        elif batch != self._batch:
            raise ValueError(
                f"the cache holds a batch of {self._batch}, the forward has {batch} rows; make a "
                "new cache or select rows with cache.batch_select_indices"
            )
        self.commit()
        self._batch, self._tokens = batch, tokens

    def _start(self, tokens: int) -> None:
        if self.kv.recipe.policy.chunk_tokens is None:
            self.kv = self._new_kv(min(tokens, LONGEST_CHUNK) if tokens > 1 else DECODE_CHUNK)

    def _refuse_broken_forward(self) -> None:
        if self._begun:
            raise ValueError(
                f"a forward reached {len(self._begun)} and finished {len(self._attended)} of "
                f"{self._plan.count} layers in this cache: it broke off, runs fewer layers, or its "
                f"attention is not {NAME!r} (the cache belongs to another model?). Call "
                "cache.crop(0) to drop its tokens and go on"
            )


def _check_options(options: dict[str, Any]) -> None:
    # No scale: the model gives its own with every call, and commits use that.
    known = {"record_mass", "workspace_bytes", "window_chunks"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(
            f"CompressedCache has no option {', '.join(unknown)}; it takes chunk and "
            f"{', '.join(sorted(known))} (options of the recipe go to videokv.recipe)"
        )
    if not isinstance(options.get("record_mass", False), bool):
        raise ValueError(f"record_mass must be True or False, got {options['record_mass']!r}")


def _new_cache(
    recipe: Recipe,
    options: dict[str, Any],
    *,
    layers: int | None,
    chunk_tokens: int | None,
    **kept_by_compress: Any,
) -> KVCache:
    if chunk_tokens is not None:
        recipe = find_recipe(recipe, chunk_tokens=chunk_tokens)
    return recipe.new_cache(layers=layers, **options)
