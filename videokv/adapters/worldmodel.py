"""The shipped world model: rollouts without a cache of their own ask ``model.cache_factory``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from videokv.adapters import NewCache
from videokv.adapters.served import Heads, Served

MODEL_CLASS = ("videokv.worldmodel.model", "WorldModel")
SEAM = "cache_factory"


class WorldModelAdapter:
    """Replaces ``model.cache_factory``, a callable that gives each rollout its cache."""

    name = "videokv.worldmodel.WorldModel"

    def matches(self, model: Any) -> bool:
        """By the names of its classes: nothing is imported."""
        return any((cls.__module__, cls.__name__) == MODEL_CLASS for cls in type(model).__mro__)

    def served(self, model: Any) -> Served:
        """Keys and values have heads of one size."""
        size, layers = model.config.head_dim, range(model.config.blocks)
        return Served(tuple(Heads(layer, size, size) for layer in layers))

    def install(self, model: Any, new_cache: NewCache) -> Callable[[], None]:
        """Caches of the recipe, with the model's number of layers and its window."""
        config = model.config
        own = vars(model).get(SEAM)

        def factory() -> Any:
            return new_cache(layers=config.blocks, window_chunks=config.window_chunks)

        setattr(model, SEAM, factory)

        def undo() -> None:
            if own is None:
                delattr(model, SEAM)
            else:
                setattr(model, SEAM, own)

        return undo


ADAPTER = WorldModelAdapter()
