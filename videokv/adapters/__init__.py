"""Adapters: the only room that knows model classes. One file a model, found by itself.

``compress(model, recipe)`` patches a model on entry and restores it on exit.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from videokv.adapters.verification import LayerError, verify
from videokv.cache import KVCache, Mass, Memory
from videokv.cache.mass import combined as combined_mass
from videokv.cache.memory import combined as combined_memory
from videokv.recipes import Recipe, recipe

NewCache = Callable[..., KVCache]


class ModelAdapter(Protocol):
    """How one kind of model is made to use our cache. A file's ``ADAPTER`` object.

    name: the model's name in messages.
    """

    name: str

    def matches(self, model: Any) -> bool:
        """Whether this model is of that kind. Must not import its library."""
        ...

    def install(self, model: Any, new_cache: NewCache) -> Callable[[], None]:
        """Patch ``model`` and return what undoes it.

        ``new_cache(branch=..., layers=..., scale=..., window_chunks=..., sink_chunks=...)`` makes
        a cache of the recipe; ``branch`` names the guidance branch it serves ("" where there is
        one). sink_chunks: first chunks that the model never lets go, which stay dense.
        """
        ...


@dataclass(frozen=True)
class Compressed:
    """What ``compress`` yields.

    caches: the cache of each guidance branch that was made last; earlier rollouts' are let go.
    """

    recipe: Recipe
    _latest: dict[str, KVCache] = field(default_factory=dict, repr=False)
    _encoded_before: dict[str, int] = field(default_factory=dict, repr=False)

    @property
    def caches(self) -> tuple[KVCache, ...]:
        return tuple(self._latest.values())

    @property
    def encode_calls(self) -> int:
        """Tensors packed since the context was entered, in earlier rollouts and rebuilds too."""
        now = sum(cache.encode_calls for cache in self.caches)
        return now + sum(self._encoded_before.values())

    def verify(self, *, limit: float | None = None) -> tuple[LayerError, ...]:
        """Compare one step of each layer with dense attention; see ``verification.verify``.

        limit: raise where a layer's relative error is above it, naming the layer.
        """
        return verify(self._some(), limit=limit)

    def memory(self) -> Memory:
        """Bytes of the last rollout's caches together."""
        return combined_memory(cache.memory() for cache in self._some())

    def mass(self) -> Mass:
        """Attention mass on cached keys in the last rollout (needs ``record_mass=True``)."""
        return combined_mass(cache.mass() for cache in self._some())

    def _some(self) -> tuple[KVCache, ...]:
        if not self._latest:
            raise ValueError("no cache was made yet: run the model inside the context first")
        return self.caches


def adapters() -> dict[str, ModelAdapter]:
    """All adapters by name: the files of this folder that have an ``ADAPTER``."""
    found: dict[str, ModelAdapter] = {}
    for module in pkgutil.iter_modules(__path__):
        adapter = getattr(importlib.import_module(f"{__name__}.{module.name}"), "ADAPTER", None)
        if adapter is not None:
            found[adapter.name] = adapter
    return dict(sorted(found.items()))


@contextmanager
def compress(
    model: Any,
    name: str | Recipe,
    *,
    workspace_bytes: int | None = None,
    record_mass: bool = False,
    **overrides: Any,
) -> Iterator[Compressed]:
    """Inside the context, ``model`` keeps its keys and values as the recipe says.

    name: a recipe or its name; ``overrides`` change it as in ``videokv.recipe``. workspace_bytes,
    record_mass: see ``KVCache``. The model is restored on exit, after an exception too.

    Raises:
        ValueError: unknown recipe or option, or a model that no adapter knows.
    """
    chosen = recipe(name, **overrides)
    adapter = _adapter_of(model)
    state = Compressed(chosen)
    make = functools.partial(_make, state, workspace_bytes=workspace_bytes, record_mass=record_mass)
    undo = adapter.install(model, make)
    try:
        yield state
    finally:
        undo()


def _make(
    state: Compressed, *, branch: str = "", sink_chunks: int = 0, **arguments: Any
) -> KVCache:
    chosen = state.recipe
    if sink_chunks > chosen.policy.sink_chunks:
        policy = dataclasses.replace(chosen.policy, sink_chunks=sink_chunks)
        chosen = dataclasses.replace(chosen, policy=policy)
    cache = chosen.new_cache(**arguments)
    if (old := state._latest.get(branch)) is not None:
        state._encoded_before[branch] = state._encoded_before.get(branch, 0) + old.encode_calls
    state._latest[branch] = cache
    return cache


def _adapter_of(model: Any) -> ModelAdapter:
    known = adapters()
    for adapter in known.values():
        if adapter.matches(model):
            return adapter
    cls = type(model)
    raise ValueError(
        f"no adapter for {cls.__module__}.{cls.__qualname__}; supported: "
        f"{', '.join(known) or 'none'}"
    )
