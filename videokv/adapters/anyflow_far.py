"""AnyFlow-FAR of diffusers: chunk-wise video with a history of full and compressed frames.

Before each chunk the model encodes its whole history again (a cache step), the newest chunks at
full resolution and the older ones with larger patches, then denoises the chunk on top of it (read
steps). So our cache is emptied and filled at every cache step, one packed chunk a chunk of the
video; statistics of the queries stay.

Keys. The model stores them before RoPE and turns them at each read. A history token's position is
the same in the cache step and in the reads after it, so we store turned keys: the same rows to the
bit, and corrections hold for every quantizer, those too whose steps differ within a pair of
channels.

Padding. In read steps the model appends zero keys and values, up to a multiple of 128 queries,
without a mask, so they take part in its softmax with score 0. We do the same, so that ``bf16``
gives what the model gives; they are current rows, which no correction touches.

Memory. The pipeline allocates dense tensors for its cache before the first chunk; they are let go
at the first call, where our cache takes their place in the model's ``kv_cache`` argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import functional

from videokv.adapters import NewCache
from videokv.adapters.diffusers_models import (
    OurProcessor,
    Processor,
    arguments,
    diffusers_heads,
    find_transformer,
    heads_first,
    heads_last,
    projected_out,
    swap_processors,
)
from videokv.adapters.served import Served
from videokv.cache import KVCache

MODULE = "diffusers.models.transformers.transformer_anyflow_far"
CLASS = "AnyFlowFARTransformer3DModel"
SLOT = "videokv"
PADDED_TO = 128
Rotate = Callable[[Tensor, Tensor], Tensor]


class AnyFlowFARAdapter:
    """Replaces the self-attention processors, and watches the calls of the transformer."""

    name = f"diffusers {CLASS}"

    def matches(self, model: Any) -> bool:
        return find_transformer(model, MODULE, CLASS) is not None

    def served(self, model: Any) -> Served:
        transformer = find_transformer(model, MODULE, CLASS)
        return Served(diffusers_heads(block.attn1 for block in transformer.blocks))

    def install(self, model: Any, new_cache: NewCache) -> Callable[[], None]:
        """One cache a rollout (one ``kv_cache`` argument)."""
        from diffusers.models.transformers.transformer_anyflow_far import apply_rotary_emb

        transformer = find_transformer(model, MODULE, CLASS)
        restore = swap_processors(
            [block.attn1 for block in transformer.blocks],
            lambda own, layer: FARProcessor(own, layer, apply_rotary_emb),
        )
        before = transformer.register_forward_pre_hook(_Before(new_cache), with_kwargs=True)
        after = transformer.register_forward_hook(_commit, with_kwargs=True)

        def undo() -> None:
            before.remove()
            after.remove()
            restore()

        return undo


class FARProcessor(OurProcessor):
    """Self-attention of one block; training calls (no cache) go to the model's own processor."""

    def __init__(self, own: Processor, layer: int, rotate: Rotate) -> None:
        super().__init__(own, layer)
        self.rotate = rotate

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Any = None,
        rotary_emb: dict[str, Tensor] | None = None,
        kv_cache: dict[str, Any] | None = None,
        kv_cache_flag: dict[str, Any] | None = None,
    ) -> Tensor:
        if kv_cache is None:
            return self.own(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        assert kv_cache_flag is not None and rotary_emb is not None
        cache: KVCache = kv_cache[SLOT]
        rows = _projections(attn, hidden_states)
        query, key, value = (heads_first(each, attn.heads) for each in rows)
        query = self.rotate(query, rotary_emb["query"])
        key = self.rotate(key, rotary_emb["key"][:, :, -key.shape[2] :])
        if kv_cache_flag["is_cache_step"]:
            cache.write(self.layer, 0, key, value, query)
            ready = _ready(attn, rows)
            return self.own(ready, hidden_states, None, attention_mask, rotary_emb)
        _check_history(cache, kv_cache_flag)
        padding = -query.shape[2] % PADDED_TO
        key, value = (functional.pad(each, (0, 0, 0, padding)) for each in (key, value))
        output = cache.attend(self.layer, query, key, value)
        return projected_out(attn, heads_last(output).type_as(hidden_states))


class _Before:
    """Gives each rollout a cache, and empties it when its history is encoded again."""

    def __init__(self, new_cache: NewCache) -> None:
        self.new_cache = new_cache

    def __call__(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        call = arguments(model, args, kwargs)
        if call.get("kv_cache") is None:
            return
        kv_cache, flag = call["kv_cache"], call["kv_cache_flag"]
        cache = self._cache_of(kv_cache, flag, layers=len(model.blocks))
        if not flag.get("is_cache_step"):
            return
        if call.get("clean_hidden_states") is not None:
            raise ValueError(
                "AnyFlow-FAR: a cache step with clean_hidden_states is no rollout; leave them out"
            )
        cache.crop(0)

    def _cache_of(self, kv_cache: Any, flag: dict[str, Any], *, layers: int) -> KVCache:
        found: KVCache | None = kv_cache[0].get(SLOT)
        if found is not None:
            return found
        if flag.get("num_cached_chunks"):
            raise ValueError(
                f"AnyFlow-FAR: this kv_cache holds {flag['num_cached_chunks']} chunks that were "
                "encoded outside videokv.compress; start the rollout inside the context"
            )
        made = self.new_cache(layers=layers)
        for layer in range(layers):
            kv_cache[layer].clear()  # the dense tensors, which nobody fills any more
            kv_cache[layer][SLOT] = made
        return made


def _commit(model: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """After a cache step: every chunk of the history becomes a chunk of the cache."""
    call = arguments(model, args, kwargs)
    if call.get("kv_cache") is None or not call["kv_cache_flag"].get("is_cache_step"):
        return
    end = 0
    for tokens in history_tokens(
        call["chunk_partition"], call["hidden_states"].shape[-2:], model.config
    ):
        end += tokens
        call["kv_cache"][0][SLOT].commit(end)


def history_tokens(
    partition: Sequence[int], latent_size: Sequence[int], config: Any
) -> tuple[int, ...]:
    """Tokens of each chunk of a history: the last ``full_chunk_limit - 1`` chunks are full.

    partition: frames of each chunk. latent_size: (height, width) of a latent frame.
    """
    height, width = latent_size

    def frame_tokens(patch: Sequence[int]) -> int:
        return (height // patch[1]) * (width // patch[2])

    full, compressed = frame_tokens(config.patch_size), frame_tokens(config.compressed_patch_size)
    far = max(0, len(partition) - (config.full_chunk_limit - 1))
    return tuple(
        frames * (compressed if number < far else full) for number, frames in enumerate(partition)
    )


def _projections(attn: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key, value ``[B, T, H * D]``, normalised, in the dtype of ``hidden``."""
    query, key = attn.norm_q(attn.to_q(hidden)), attn.norm_k(attn.to_k(hidden))
    return query.to(hidden.dtype), key.to(hidden.dtype), attn.to_v(hidden)


def _ready(attn: Any, rows: tuple[Tensor, Tensor, Tensor]) -> SimpleNamespace:
    """The attention module as its own processor sees it, with projections that are done."""
    query, key, value = rows
    return SimpleNamespace(
        heads=attn.heads,
        to_q=lambda _: query,
        to_k=lambda _: key,
        to_v=lambda _: value,
        norm_q=None,
        norm_k=None,
        to_out=attn.to_out,
    )


def _check_history(cache: KVCache, flag: dict[str, Any]) -> None:
    expected = flag["num_cached_compressed_tokens"] + flag["num_cached_full_tokens"]
    if cache.length != expected:
        raise ValueError(
            f"AnyFlow-FAR: this chunk reads a history of {expected} tokens, the cache holds "
            f"{cache.length}; run a cache step over all chunks before it"
        )


ADAPTER = AnyFlowFARAdapter()
