"""The Wan variant of HY-WorldPlay: rotary and ProPE rows side by side, ``[B, H, S, 2 D]``.

Its processor attends to both as one batch of 2 B; that batch is what is packed, half by half.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from videokv.adapters import NewCache
from videokv.adapters.history import Handle, History
from videokv.adapters.methods import Patches
from videokv.adapters.proxy import Slots, inner_models
from videokv.adapters.served import Heads, Served, weight_dtype

MODULE = "dits.arwan_w_action_w_mem_relative_rope"
PROCESSOR = "CausalCameraPRopeWanAttnProcessor2_0"


class HyWorldPlayWan:
    """The processor runs without its cache; the attention function it calls adds the history."""

    name = "HY-WorldPlay, Wan variant"

    def matches(self, model: Any) -> bool:
        return _find(model) is not None

    def served(self, model: Any) -> Served:
        """Both branches have heads of one size."""
        found = _find(model)
        assert found is not None
        sizes, dtype = 2 * (found.attention_head_dim,), weight_dtype(found)
        layers = range(len(_attentions(found)))
        return Served(tuple(Heads(i, *sizes, dtype=dtype) for i in layers), own_window=True)

    def install(self, model: Any, new_cache: NewCache) -> Callable[[], None]:
        found = _find(model)
        assert found is not None
        module = sys.modules[type(found).__module__]
        layers = {id(part): part for part in _attentions(found)}
        if not layers or not callable(getattr(module, "sageattn", None)):
            raise ValueError(
                f"{self.name}: expected attention modules with {PROCESSOR} and a function "
                f"'sageattn' in {module.__name__}, found {len(layers)} such modules; this version "
                "of the repository is not supported"
            )
        order = {key: index for index, key in enumerate(layers)}
        patches = Patches()
        steps = _Steps(order, new_cache)
        patches.wrap_method(getattr(module, PROCESSOR), "__call__", steps.process)
        patches.wrap(module, "sageattn", steps.attend)
        return patches.undo


class _Steps:
    """What one call of the processor leaves for the attention function, and back."""

    def __init__(self, order: dict[int, int], new_cache: NewCache) -> None:
        self.order = order
        self.new_cache = new_cache
        self.slots = Slots()
        self.fresh: History | None = None
        self.reading: tuple[History, int] | None = None
        self.caching = False
        self.seen: tuple[Tensor, Tensor, Tensor] | None = None

    def process(self, original: Callable, processor: Any, attn: Any, *args: Any, **kw: Any) -> Any:
        held = kw.get("kv_cache")
        if id(attn) not in self.order or held is None:
            return original(processor, attn, *args, **kw)
        layer, caching = self.order[id(attn)], bool(kw.get("is_cache"))
        handle = held["k"] if isinstance(held["k"], Handle) else None
        if handle is None and not caching:
            return original(processor, attn, *args, **kw)
        kw["kv_cache"] = {"k": None, "v": None}
        self.caching = caching
        self.reading = None if caching or handle is None else (handle.history, layer)
        try:
            hidden, made = original(processor, attn, *args, **kw)
            if caching:
                made = self._store(layer, handle)
        finally:
            self.reading, self.seen, self.caching = None, None, False
        return hidden, made

    def attend(self, original: Callable, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kw: Any):
        if self.reading is not None:
            history, layer = self.reading
            return history.attend(layer, q, k, v)
        if self.caching:
            self.seen = (q, k, v)
        return original(q, k, v, *args, **kw)

    def _store(self, layer: int, handle: Handle | None) -> dict[str, Handle]:
        assert self.seen is not None
        query, keys, values = self.seen
        history = self._history(layer, handle)
        history.write(layer, keys, values, query)
        batch, heads, tokens, size = keys.shape
        like = torch.empty(batch // 2, heads, tokens, 2 * size, dtype=keys.dtype, device="meta")
        return {name: Handle(history, layer, like) for name in "kv"}

    def _history(self, layer: int, handle: Handle | None) -> History:
        if handle is not None:
            return handle.history
        if layer == 0:
            branch = self.slots.free()
            make = functools.partial(self.new_cache, branch=branch, layers=len(self.order))
            self.fresh = History(make)
            self.slots.take(branch, self.fresh)
        assert self.fresh is not None
        history = self.fresh
        if layer == len(self.order) - 1:
            self.fresh = None
        return history


def _attentions(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The attention modules of the blocks, in order."""
    return [
        part
        for part in model.modules()
        if type(getattr(part, "processor", None)).__name__ == PROCESSOR
    ]


def _find(model: Any) -> Any | None:
    for candidate in inner_models(model):
        if type(candidate).__module__.endswith(MODULE) and isinstance(candidate, torch.nn.Module):
            return candidate
    return None


ADAPTER = HyWorldPlayWan()
