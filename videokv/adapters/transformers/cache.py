"""The cache object that language models of transformers take."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from videokv.adapters.transformers.attention import NAME, Turn
from videokv.adapters.transformers.models import (
    check_installed,
    check_model,
    install,
    uninstall,
)
from videokv.cache import KVCache, Mass, Memory
from videokv.recipes import Recipe
from videokv.recipes import recipe as find_recipe

DECODE_CHUNK = 128
LONGEST_CHUNK = 512


class CompressedLayer(CacheLayerMixin):
    """One layer as transformers sees it; the rows are in the KVCache of ``CompressedCache``."""

    is_croppable = False  # a cut packed chunk is not what it was before

    def __init__(self, owner: CompressedCache, index: int) -> None:
        super().__init__()
        self._owner = weakref.ref(owner)
        self._index = index

    @property
    def owner(self) -> CompressedCache:
        owner = self._owner()
        if owner is None:
            raise ValueError("the CompressedCache of this layer is gone; keep a reference to it")
        return owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: storage grows with the chunks."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new rows as they are; ``kwargs["kwargs"]`` gets the Turn of this layer."""
        passed = kwargs.get("kwargs")
        if not isinstance(passed, dict):
            raise ValueError(
                f"layer {self._index} does not hand its keyword arguments to the cache, as models "
                f"of transformers 5 do (this is {transformers.__version__}): it cannot be used "
                "with CompressedCache; update transformers or use a model class that does"
            )
        self.owner.begin(self._index, key_states)
        passed[NAME] = Turn(self.owner, self._index)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.length_of(self._index)

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        raise ValueError("layers of a CompressedCache are reset together: call cache.reset()")

    def offload(self) -> None:
        raise ValueError("CompressedCache does not offload through transformers")

    prefetch = offload


class CompressedCache(Cache):
    """Cache for ``model(..., past_key_values=cache)`` and ``model.generate``.

    Making one switches the attention of ``model`` to ``"videokv"``; ``close``, the end of a
    ``with`` block or the end of the cache's life switches it back.

    model: a decoder-only transformers model whose layers all attend to everything before them.
    chunk: tokens that are packed together. Final tokens fill chunks of this size in order, however
        they came (one forward per chunk, one long prompt, or one by one when decoding); those
        that do not fill one yet stay dense. None: as the recipe's policy says, else the length
        of the first forward, at most 512; 128 where that is a single token.
    options: passed to ``Recipe.new_cache`` (``record_mass``, ``workspace_bytes``).

    Refuses (ValueError): sliding-window and other layers that are not plain attention, padding,
    masks of one's own, an attention function that was replaced after the cache was made.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: str | Recipe,
        *,
        chunk: int | None = None,
        **options: Any,
    ) -> None:
        self._count = check_model(model)
        self._recipe = find_recipe(recipe)
        self._options = options
        self._chosen_chunk = chunk
        self._model = model
        self.reset()
        super().__init__(layers=[CompressedLayer(self, i) for i in range(self._count)])
        install(model)
        self._release = weakref.finalize(self, uninstall, weakref.ref(model))

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
        self.kv = self._new_kv(self._chosen_chunk)
        self._length = 0
        self._batch = -1
        self._abandon_forward()

    # -- tokens -----------------------------------------------------------------------------

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
        self._begun.add(layer)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float
    ) -> Tensor:
        """Write the rows of this forward and attend; ``[B, Hq, M, Dv]``."""
        self.kv.write(layer, self._length, key, value, query)
        output = self.kv.attend(layer, query, key, value, scale=scale, causal=True)
        self._attended.add(layer)
        if len(self._attended) == self._count:
            self._length += self._tokens
            self._abandon_forward()
        return output

    # -- the cache as an object -------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens (a number <= 0, as in transformers 5).

        Also drops the tokens of a forward that broke off. More than there are: empties it. Where
        the cut falls inside a packed chunk, its first rows are decoded and stay dense.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, got {tokens_to_remove}"
            )
        self._abandon_forward()
        length = max(0, self._length + tokens_to_remove)
        if length == 0:
            self.reset()
            return
        if length > self.kv.length:  # rows that stay become final, so that the rest can go
            self.kv.commit(length)
        self.kv.crop(length, decode_partial=True)
        self._length = length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch, in this order; packed chunks are moved, not repacked."""
        self._refuse_broken_forward()
        if self._length:
            self.kv.select_batch(indices)
            self._batch = len(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(max(self._batch, 0), device=self._model.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def memory(self) -> Memory:
        """Bytes and bits held (``videokv.cache.memory.Memory``)."""
        return self.kv.memory()

    def mass(self) -> Mass:
        """Mean attention mass on the tokens before a forward (option ``record_mass=True``)."""
        return self.kv.mass()

    # -- one forward ------------------------------------------------------------------------

    def _new_kv(self, chunk: int | None) -> KVCache:
        policy = self._recipe.policy
        if chunk is not None:
            policy = replace(policy, chunk_tokens=chunk)
        return replace(self._recipe, policy=policy).new_cache(layers=self._count, **self._options)

    def _abandon_forward(self) -> None:
        self._begun: set[int] = set()
        self._attended: set[int] = set()
        self._tokens = 0

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
        if self._chosen_chunk is None and self._recipe.policy.chunk_tokens is None:
            self.kv = self._new_kv(min(tokens, LONGEST_CHUNK) if tokens > 1 else DECODE_CHUNK)

    def _refuse_broken_forward(self) -> None:
        if self._begun:
            raise ValueError(
                f"a forward reached {len(self._begun)} and finished {len(self._attended)} of "
                f"{self._count} layers in this cache: it broke off, runs fewer layers, or its "
                f"attention is not {NAME!r} (the cache belongs to another model?). Call "
                "cache.crop(0) to drop its tokens and go on"
            )
