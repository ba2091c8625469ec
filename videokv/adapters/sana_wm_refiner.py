"""SANA-WM's refiner of diffusers: blocks of frames refined on a sink and a trimmed history.

Denoising steps (``kv_cache_mode="inject"``) read the sink, the history and the current block. One
clean pass a block (``"inject_and_capture_post_rope"``) hands its turned keys to the pipeline, which
appends them to the history and trims that from the front. We keep the history: what the pipeline
gets, joins and trims are tensors of no channels, ``[B, tokens, 0]``, whose length says how much of
ours is still wanted. A block becomes one packed chunk; where the pipeline trims inside one, its
last rows are read with the codes they have.

The sink (the first frame or frames) is turned anew for every block, so it stays where the model
keeps it: dense, before RoPE, read as current rows that no correction touches. It is not in
``memory()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

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

MODULE = "diffusers.models.transformers.transformer_sana_wm_refiner"
CLASS = "SanaWMLTX2RefinerTransformer3DModel"
SLOT = "videokv"
CAPTURE = "inject_and_capture_post_rope"
READING = ("inject", CAPTURE)
Rotate = Callable[[Tensor, Any], Tensor]


class SanaWMRefinerAdapter:
    """Replaces the self-attention processors, and watches the calls of the transformer."""

    name = f"diffusers {CLASS}"

    def matches(self, model: Any) -> bool:
        return find_transformer(model, MODULE, CLASS) is not None

    def served(self, model: Any) -> Served:
        transformer = find_transformer(model, MODULE, CLASS)
        return Served(diffusers_heads(block.attn1 for block in transformer.transformer_blocks))

    def install(self, model: Any, new_cache: NewCache) -> Callable[[], None]:
        """One cache a rollout (one ``SanaWMRefinerKVCache``)."""
        from diffusers.models.transformers import transformer_sana_wm_refiner as library

        rotate = {
            "interleaved": library.apply_interleaved_rotary_emb,
            "split": library.apply_split_rotary_emb,
        }
        transformer = find_transformer(model, MODULE, CLASS)
        restore = swap_processors(
            [block.attn1 for block in transformer.transformer_blocks],
            lambda own, layer: RefinerProcessor(own, layer, rotate),
        )
        before = transformer.register_forward_pre_hook(_Before(new_cache), with_kwargs=True)
        after = transformer.register_forward_hook(_commit, with_kwargs=True)

        def undo() -> None:
            before.remove()
            after.remove()
            restore()

        return undo


class RefinerProcessor(OurProcessor):
    """Self-attention of one block; calls that read no cache go to the model's own processor."""

    def __init__(self, own: Processor, layer: int, rotate: Mapping[str, Rotate]) -> None:
        super().__init__(own, layer)
        self.rotate = rotate

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_rotary_emb: Any = None,
        key_rotary_emb: Any = None,
        sink_rotary_emb: Any = None,
        kv_cache: Any = None,
        kv_cache_mode: str | None = None,
    ) -> Tensor:
        if kv_cache_mode not in READING:
            return self.own(
                attn,
                hidden_states,
                encoder_hidden_states,
                attention_mask,
                query_rotary_emb,
                key_rotary_emb,
                sink_rotary_emb=sink_rotary_emb,
                kv_cache=kv_cache,
                kv_cache_mode=kv_cache_mode,
            )
        rotate = self.rotate[attn.rope_type]
        query = rotate(attn.norm_q(attn.to_q(hidden_states)), query_rotary_emb)
        key = rotate(attn.norm_k(attn.to_k(hidden_states)), query_rotary_emb)
        value = attn.to_v(hidden_states)
        sink = _sink(kv_cache, rotate, sink_rotary_emb, dtype=key.dtype)
        output = self._attend(attn, kv_cache, kv_cache_mode, (query, key, value), sink)
        return projected_out(attn, _gated(attn, hidden_states, output))

    def _attend(
        self,
        attn: Any,
        kv_cache: Any,
        mode: str | None,
        rows: tuple[Tensor, Tensor, Tensor],
        sink: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """``[B, T, H * D]``; a clean pass also writes, and hands out rows of no channels."""
        cache: KVCache = getattr(kv_cache, SLOT)
        query, key, value = (heads_first(each, attn.heads) for each in rows)
        if mode == CAPTURE:
            cache.write(self.layer, cache.length, key, value, query)
            kv_cache.store_captured_post_rope(rows[1][..., :0], rows[2][..., :0])
        if sink is not None:
            before = [heads_first(each, attn.heads) for each in sink]
            key = torch.cat([before[0], key], 2)
            value = torch.cat([before[1], value], 2)
        return heads_last(cache.attend(self.layer, query, key, value)).to(rows[0].dtype)


class _Before:
    """Gives each rollout a cache, and forgets what the pipeline trimmed off its history."""

    def __init__(self, new_cache: NewCache) -> None:
        self.new_cache = new_cache

    def __call__(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        call = arguments(model, args, kwargs)
        container, mode = call.get("kv_cache"), call.get("kv_cache_mode")
        if container is None or mode not in READING:
            return
        layers = [container.get(index) for index in range(len(container))]
        kept = [_kept_tokens(layer) for layer in layers]
        if len(set(kept)) > 1:
            raise ValueError(
                f"SANA-WM refiner: the layers keep histories of {sorted(set(kept))} tokens; they "
                "must be trimmed alike"
            )
        cache = self._cache_of(layers, kept=kept[0])
        if kept[0] > cache.length:
            raise ValueError(
                f"SANA-WM refiner: the history has {kept[0]} tokens, the cache holds "
                f"{cache.length}; append each captured block once"
            )
        cache.forget(cache.length - kept[0])

    def _cache_of(self, layers: list[Any], *, kept: int) -> KVCache:
        found: KVCache | None = getattr(layers[0], SLOT, None)
        if found is not None and (kept or not found.length):
            return found
        made = self.new_cache(layers=len(layers))
        for layer in layers:
            setattr(layer, SLOT, made)
        return made


def _commit(model: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """After a clean pass: the block becomes a chunk of the cache."""
    call = arguments(model, args, kwargs)
    if call.get("kv_cache") is not None and call.get("kv_cache_mode") == CAPTURE:
        cache: KVCache = getattr(call["kv_cache"].get(0), SLOT)
        cache.commit(cache.length + call["hidden_states"].shape[1])


def _kept_tokens(layer: Any) -> int:
    """Tokens of the history of one layer cache; their channels are with us."""
    history = layer.get_history()
    if history is None:
        return 0
    if history[0].shape[2]:
        raise ValueError(
            "SANA-WM refiner: this kv_cache has a dense history, made outside videokv.compress; "
            "start the rollout inside the context"
        )
    return int(history[0].shape[1])


def _sink(
    kv_cache: Any, rotate: Rotate, angles: Any, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Turned keys and values ``[B, T, H * D]`` of the sink, None where there is none."""
    held = kv_cache.get_sink()
    if held is None:
        return None
    if angles is None:
        raise ValueError("SANA-WM refiner: kv_cache.sink_pe is not set, but there is a sink")
    return rotate(held[0].to(dtype), angles), held[1].to(dtype)


def _gated(attn: Any, hidden: Tensor, output: Tensor) -> Tensor:
    """The gate of each head (LTX-2.3), where the model has them."""
    if attn.to_gate_logits is None:
        return output
    gates = 2.0 * torch.sigmoid(attn.to_gate_logits(hidden))
    return (output.unflatten(2, (attn.heads, -1)) * gates.unsqueeze(-1)).flatten(2, 3)


ADAPTER = SanaWMRefinerAdapter()
