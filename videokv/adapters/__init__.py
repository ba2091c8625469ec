"""Adapters: the only room that knows model classes. One file a model, found by itself.

``compress(model, recipe)`` patches a model on entry and restores it on exit.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from videokv.adapters.served import Served, check
from videokv.adapters.verify import LayerCheck, RecordingCache
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

    def served(self, model: Any) -> Served:
        """What the model asks of a recipe, as far as it can be told before it runs."""
        ...

    def install(self, model: Any, new_cache: NewCache) -> Callable[[], None]:
        """Patch ``model`` and return what undoes it.

        ``new_cache(branch=..., alone=..., layers=..., scale=..., window_chunks=...,
        chunk_tokens=..., sink_chunks=...)`` makes a cache of the recipe; ``branch`` names the
        guidance branch it serves ("" where there is one), ``alone`` says that those of all other
        branches are done, ``chunk_tokens`` replaces what the policy says, ``sink_chunks`` are
        first chunks that the model never lets go, which stay dense.
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

    def memory(self) -> Memory:
        """Bytes of the last rollout's caches together."""
        return combined_memory(cache.memory() for cache in self._some())

    def mass(self) -> Mass:
        """Attention mass on cached keys in the last rollout (needs ``record_mass=True``)."""
        return combined_mass(cache.mass() for cache in self._some())

    def verify(self, tolerance: float | None = None) -> tuple[LayerCheck, ...]:
        """Compare attention on packed rows with dense attention: the last step of every layer.

        Needs a context with ``record_dense=True``, in which every step runs on the packed history
        and on a dense copy. tolerance: largest relative error of a layer's output; None takes three
        times the layers' median, at least 1 %. A warning names the layers above it, and ``ok`` of
        their checks is False.

        Raises:
            ValueError: nothing was recorded, or the tolerance is not positive.
        """
        recorded = [cache for cache in self._some() if isinstance(cache, RecordingCache)]
        if not recorded:
            raise ValueError("verify() needs videokv.compress(..., record_dense=True)")
        checks = tuple(
            check
            for number, cache in enumerate(recorded)
            for check in cache.check(tolerance, branch=number)
        )
        if not checks:
            raise ValueError("verify() needs a step on a history; run the model for two chunks")
        if bad := [str(check) for check in checks if not check.ok]:
            warnings.warn(
                f"attention on packed keys and values is far from dense attention in {len(bad)} of "
                f"{len(checks)} layers; use more bits or another recipe. {'; '.join(bad[:8])}",
                stacklevel=2,
            )
        return checks

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
    record_dense: bool = False,
    **overrides: Any,
) -> Iterator[Compressed]:
    """Inside the context, ``model`` keeps its keys and values as the recipe says.

    name: a recipe or its name; ``overrides`` change it as in ``videokv.recipe``. workspace_bytes,
    record_mass: see ``KVCache``. record_dense: run every step on a dense copy of the history too,
    for ``verify()`` (in short self-tests). The model is restored on exit, after an exception too.

    Raises:
        ValueError: unknown recipe or option, a model that no adapter knows, or heads, a window or
            rotary embedding for which the recipe does not serve (on entry; heads whose size a
            model does not tell, at the first write).
    """
    chosen = recipe(name, **overrides)
    adapter = _adapter_of(model)
    check(chosen, adapter.served(model), name=adapter.name)
    state = Compressed(chosen)
    make = functools.partial(
        _make,
        state,
        record_dense=record_dense,
        workspace_bytes=workspace_bytes,
        record_mass=record_mass,
    )
    undo = adapter.install(model, make)
    try:
        yield state
    finally:
        undo()


def _make(
    state: Compressed,
    *,
    record_dense: bool,
    branch: str = "",
    alone: bool = False,
    chunk_tokens: int | None = None,
    sink_chunks: int = 0,
    **arguments: Any,
) -> KVCache:
    chosen = state.recipe
    if chunk_tokens is not None:
        chosen = recipe(chosen, chunk_tokens=chunk_tokens)
    if sink_chunks > chosen.policy.sink_chunks:
        chosen = recipe(chosen, sink_chunks=sink_chunks)
    cache = chosen.new_cache(**arguments)
    if record_dense:
        kept = ("workspace_bytes", "record_mass")
        options = {**cache.options(), **{name: arguments[name] for name in kept}}
        # the model's window may be in the policy of the cache
        cache = RecordingCache(dataclasses.replace(chosen, policy=cache.recipe.policy), **options)
    for name in list(state._latest) if alone else [branch]:
        if (old := state._latest.pop(name, None)) is not None:
            state._encoded_before[name] = state._encoded_before.get(name, 0) + old.encode_calls
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
