"""MAGI-1 (SandAI-org/MAGI-1): keys and values in one buffer ``[T B, Hkv, 2 D]``, grouped heads.

Rows below ``slice_point`` chunks are final. Chunks still being denoised are written by the model
too, but only the first of them is ever read later, so only that one is kept.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from videokv.adapters import NewCache
from videokv.adapters.methods import Patches
from videokv.adapters.proxy import Slots, inner_models
from videokv.adapters.rows import Piece
from videokv.adapters.served import Heads, Served, check_window, weight_dtype
from videokv.adapters.store import attend_pieces
from videokv.cache import KVCache

MODULE, CLASS = "dit.dit_module", "FullyParallelAttention"


@dataclass(frozen=True, eq=False)
class Rows:
    """What stands in for the keys and the values that the model passes on to its attention.

    history: tokens that are final. current: ``[N B, Hkv, D]``. written: rows of ``current`` to
    keep.
    """

    cache: KVCache
    layer: int
    history: int
    current: Tensor
    written: int


class Clip:
    """The cache of one ``InferenceParams``: one video."""

    def __init__(self, make: Callable[[], KVCache]) -> None:
        self.cache = make()
        check_window(self.cache.recipe)


class Magi:
    """Two methods of every attention module are wrapped."""

    name = "MAGI-1"

    def matches(self, model: Any) -> bool:
        return bool(_find(model))

    def served(self, model: Any) -> Served:
        """Grouped heads; keys and values of one size (``kv_channels``)."""
        found = []
        for layer, attention in enumerate(_find(model)):
            config = attention.model_config
            size, counts = config.kv_channels, (config.num_attention_heads, config.num_query_groups)
            found.append(Heads(layer, size, size, *counts, weight_dtype(attention)))
        return Served(tuple(found), own_window=True)

    def install(self, model: Any, new_cache: NewCache) -> Callable[[], None]:
        patches, steps = Patches(), _Steps(new_cache)
        for attention in _find(model):
            strategy = getattr(attention.engine_config, "cp_strategy", "none")
            if strategy != "none":
                raise ValueError(
                    f"{self.name}: cp_strategy {strategy!r} splits the cache over GPUs, which is "
                    "not served; set cp_strategy to 'none' and cp_size to 1"
                )
            bound: dict[str, Callable] = {
                "adjust_key_and_value_for_inference": steps.gather,
                "core_attention": steps.attend,
            }
            for name, step in bound.items():
                patches.wrap(attention, name, functools.partial(_with, step, attention))
        return patches.undo


class _Steps:
    """The two steps of a layer's self-attention."""

    def __init__(self, new_cache: NewCache) -> None:
        self.new_cache = new_cache
        self.slots = Slots()
        self.clips: weakref.WeakKeyDictionary[Any, Clip] = weakref.WeakKeyDictionary()

    def gather(
        self, original: Callable, attention: Any, key_and_value: Tensor, params: Any, meta: Any
    ) -> Any:
        """History and current rows, as the two things that ``core_attention`` is given."""
        if params is None:
            return original(key_and_value, params, meta)
        prefix = meta.extract_prefix_video_feature
        if not (prefix or meta.fwd_extra_1st_chunk or meta.slice_point > 0):
            return original(key_and_value, params, meta)
        batch, chunk = params.max_batch_size, meta.clip_token_nums
        history = meta.slice_point * chunk
        cache = self._cache(params)
        self._advance(cache, history)
        written = 0
        if params.update_kv_cache:
            written = key_and_value.shape[0] // batch if prefix else chunk
        keys, values = key_and_value.chunk(2, dim=-1)
        layer = attention.layer_number
        return tuple(Rows(cache, layer, history, part, written) for part in (keys, values))

    def attend(
        self,
        original: Callable,
        attention: Any,
        query: Tensor,
        key: Any,
        value: Any,
        bs: int,
        meta_args: Any,
    ) -> Tensor:
        if not isinstance(key, Rows):
            return original(query, key, value, bs, meta_args)
        q, k, v = (_heads(x, bs) for x in (query, key.current, value.current))
        if key.written:
            part = slice(0, key.written)
            key.cache.write(key.layer, key.history, k[:, :, part], v[:, :, part], q[:, :, part])
        params = meta_args.core_attn_params
        count = meta_args.denoising_range_num if bs == 1 else 1
        outputs = []
        for (first, last), span in zip(
            params.np_q_range[:count], params.np_k_range[:count], strict=True
        ):
            keys, values = _in_span(key, k, v, int(span[0]), int(span[1]))
            rows = q[:, :, int(first) : int(last)]
            out = attend_pieces(key.cache, key.layer, rows, keys, values)
            outputs.append(out.permute(2, 0, 1, 3).flatten(0, 1))  # [(sq b), Hq, D]
        return torch.cat(outputs)

    def _cache(self, params: Any) -> KVCache:
        if params not in self.clips:
            branch = self.slots.free()
            clip = Clip(functools.partial(self.new_cache, branch=branch))
            self.slots.take(branch, clip)
            self.clips[params] = clip
        return self.clips[params].cache

    def _advance(self, cache: KVCache, history: int) -> None:
        if history < cache.length:
            raise ValueError(
                f"the model went back to {history} final tokens after {cache.length}; make new "
                "InferenceParams for a new video"
            )
        cache.commit(history)


def _in_span(
    rows: Rows, keys: Tensor, values: Tensor, first: int, last: int
) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Rows first..last of history and current rows together, for keys and for values."""
    past = min(last, rows.history) - first
    old = (Piece(past, first),) if past > 0 else ()
    low, high = max(first - rows.history, 0), last - rows.history
    if high <= low:
        return old, old
    fresh = [x.transpose(1, 2)[:, low:high] for x in (keys, values)]
    key, value = (Piece(high - low, dense=x) for x in fresh)
    return (*old, key), (*old, value)


def _heads(x: Tensor, batch: int) -> Tensor:
    """``[(T B), H, D]`` as ``[B, H, T, D]``."""
    return x.unflatten(0, (-1, batch)).permute(1, 2, 0, 3)


def _with(step: Callable, attention: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
    return step(original, attention, *args, **kwargs)


def _find(model: Any) -> list[Any]:
    return [
        part
        for candidate in inner_models(model)
        if isinstance(candidate, torch.nn.Module)
        for part in candidate.modules()
        if type(part).__module__.endswith(MODULE) and type(part).__name__ == CLASS
    ]


ADAPTER = Magi()
