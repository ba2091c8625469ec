"""HY-WorldPlay 8B (Tencent-Hunyuan/HY-WorldPlay).

A batch holds two branches, rotary and ProPE; both keep what attention reads, so their rows are
taken as they are. The text prefix stays dense. Each chunk re-encodes the retrieved frames.
"""

from __future__ import annotations

import functools
import inspect
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
from videokv.protocols import Segment

MODULE = "models.transformers.worldplay_1_5_transformer"
FUNCTION = "sequence_parallel_attention_vision"


class HyWorldPlay:
    """The function that attends for all blocks is replaced in the transformer's module."""

    name = "HY-WorldPlay 8B"

    def matches(self, model: Any) -> bool:
        return _find(model) is not None

    def served(self, model: Any) -> Served:
        """Both branches have heads of one size."""
        found = _find(model)
        assert found is not None
        sizes, dtype = 2 * (found.hidden_size // found.heads_num,), weight_dtype(found)
        layers = range(len(found.double_blocks))
        return Served(tuple(Heads(i, *sizes, dtype=dtype) for i in layers), own_window=True)

    def install(self, model: Any, new_cache: NewCache) -> Callable[[], None]:
        module = sys.modules[type(_find(model)).__module__]
        if not callable(getattr(module, FUNCTION, None)):
            raise ValueError(
                f"{self.name}: {module.__name__} has no function {FUNCTION!r}; this version of the "
                "repository is not supported"
            )
        patches = Patches()
        patches.wrap(module, FUNCTION, _Attention(module, new_cache))
        return patches.undo


class _Attention:
    """Stands in for the model's function; histories are found through the handles they gave."""

    def __init__(self, module: Any, new_cache: NewCache) -> None:
        self.module = module
        self.new_cache = new_cache
        self.slots = Slots()
        self.fresh: tuple[int, History] | None = None

    def __call__(self, original: Callable, q: Any, k: Any, v: Any, *args: Any, **kw: Any) -> Any:
        given = inspect.signature(original).bind(q, k, v, *args, **kw).arguments
        layer, held = given["block_idx"], given["kv_cache"][given["block_idx"]]
        if given.get("cache_vision"):
            return self._cache_pass(original, given)
        if not isinstance(held["k_vision"], Handle):
            return original(q, k, v, *args, **kw)
        self._refuse_parallel(layer)
        query, key, value = (_heads(pair) for pair in (q, k, v))
        text = Segment(*(held[name].repeat_interleave(2, 0) for name in ("k_txt", "v_txt")))
        output = held["k_vision"].history.attend(layer, query, key, value, before=[text])
        halves = output.transpose(1, 2).flatten(2).chunk(2)
        return *halves, {}

    def _cache_pass(self, original: Callable, given: dict[str, Any]) -> Any:
        layer = given["block_idx"]
        self._refuse_parallel(layer)
        hidden, prope, made = original(**given)
        history = self._history(given["kv_cache"], layer)
        history.write(layer, made["k_vision"], made["v_vision"], _heads(given["q"]))
        return hidden, prope, {name: Handle(history, layer, rows) for name, rows in made.items()}

    def _history(self, kv_cache: Any, layer: int) -> History:
        """That of the guidance branch whose list this is; a new one for a new video."""
        held = kv_cache[layer]["k_vision"]
        if isinstance(held, Handle):
            return held.history
        if self.fresh is None or self.fresh[0] != id(kv_cache):
            branch = self.slots.free()
            history = History(functools.partial(self.new_cache, branch=branch))
            self.slots.take(branch, history)
            self.fresh = (id(kv_cache), history)
        history = self.fresh[1]
        if layer == len(kv_cache) - 1:
            self.fresh = None
        return history

    def _refuse_parallel(self, layer: int) -> None:
        state = self.module.get_parallel_state()
        if getattr(state, "sp_enabled", False):
            raise ValueError(
                f"layer {layer}: sequence parallelism splits the cache over GPUs, which is not "
                "served; run with a sequence-parallel size of 1"
            )


def _heads(pair: Any) -> Tensor:
    """The two branches ``[B, T, H, D]`` as one batch ``[2B, H, T, D]``."""
    return torch.cat(tuple(pair)).transpose(1, 2)


def _find(model: Any) -> Any | None:
    for candidate in inner_models(model):
        if type(candidate).__module__.endswith(MODULE) and hasattr(candidate, "forward"):
            return candidate
    return None


ADAPTER = HyWorldPlay()
