"""LongCat-Video (meituan-longcat/LongCat-Video).

The model caches keys before rotary embedding and rotates the whole sequence at each read. The
cached frames have the same positions in every read as in the cache pass, so their rotated keys
are kept: exact for every recipe, and nothing is rotated again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from videokv.adapters import NewCache
from videokv.adapters.history import Handle, History
from videokv.adapters.methods import Patches
from videokv.adapters.proxy import inner_models
from videokv.adapters.served import Served, heads_of

MODULE, CLASS = "longcat_video.modules.longcat_video_dit", "LongCatVideoTransformer3DModel"


class LongCat:
    """Methods of every block's attention are wrapped; none is written again."""

    name = "LongCat-Video"

    def matches(self, model: Any) -> bool:
        return _find(model) is not None

    def served(self, model: Any) -> Served:
        found = _find(model)
        assert found is not None
        attentions = [block.attn for block in found.blocks]
        return Served(heads_of(attentions, size="head_dim", count="num_heads"), own_window=True)

    def install(self, model: Any, new_cache: NewCache) -> Callable[[], None]:
        found = _find(model)
        assert found is not None
        history = History(functools.partial(new_cache, layers=len(found.blocks)))
        patches = Patches()
        for index, block in enumerate(found.blocks):
            _Layer(history, index, block.attn).install(patches)
        return patches.undo


class _Layer:
    """One attention module; ``rotated`` holds what its rotary embedding gave last."""

    def __init__(self, history: History, index: int, attention: Any) -> None:
        self.history = history
        self.index = index
        self.attention = attention
        self.rotated: tuple[Tensor, Tensor] | None = None
        self.reading = 0

    def install(self, patches: Patches) -> None:
        for name in ("forward", "forward_with_kv_cache", "_process_attn", "rope_3d"):
            if not hasattr(self.attention, name):
                raise ValueError(
                    f"LongCat-Video: {type(self.attention).__name__} has no {name!r}; this version "
                    "of the repository is not supported"
                )
        patches.wrap(self.attention, "forward", self._cache_pass)
        patches.wrap(self.attention, "forward_with_kv_cache", self._read)
        patches.wrap(self.attention, "_process_attn", self._attend)
        patches.wrap(self.attention.rope_3d, "forward", self._rope)

    def _cache_pass(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if not isinstance(output, tuple):
            self.rotated = None
            return output
        hidden, (keys, values) = output
        assert self.rotated is not None
        query, key = self.rotated
        self.rotated = None
        self.history.write(self.index, key, values, query)
        return hidden, tuple(Handle(self.history, self.index, t) for t in (keys, values))

    def _read(self, original: Callable, x: Tensor, *args: Any, kv_cache: Any, **kw: Any) -> Any:
        """The model's own method, on zeros in the place of the cached rows."""
        keys, values = kv_cache
        if not isinstance(keys, Handle):
            return original(x, *args, kv_cache=kv_cache, **kw)
        if self.attention.enable_bsa:
            raise ValueError(
                f"layer {self.index}: block-sparse attention (refinement) cannot read a compressed "
                "cache; call disable_bsa() on the transformer, or refine outside videokv.compress"
            )
        self.reading = keys.shape[2]
        zeros = tuple(torch.zeros(h.shape, dtype=h.dtype, device=x.device) for h in (keys, values))
        try:
            return original(x, *args, kv_cache=zeros, **kw)
        finally:
            self.reading = 0

    def _attend(self, original: Callable, q: Tensor, k: Tensor, v: Tensor, shape: Any) -> Tensor:
        if not self.reading:
            return original(q, k, v, shape)
        current = (k[:, :, self.reading :], v[:, :, self.reading :])
        return self.history.attend(self.index, q, *current, scale=self.attention.scale)

    def _rope(self, original: Callable, q: Tensor, k: Tensor, *args: Any) -> Any:
        self.rotated = original(q, k, *args)
        if self.reading:
            rotated, self.rotated = self.rotated, None
            return rotated
        return self.rotated


def _find(model: Any) -> Any | None:
    for candidate in inner_models(model):
        cls = type(candidate)
        if cls.__module__.endswith(MODULE) and cls.__name__ == CLASS:
            return candidate
    return None


ADAPTER = LongCat()
