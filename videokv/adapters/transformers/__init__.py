"""Language models of transformers: a cache that is compressed chunk by chunk, and its attention.

    model.forward -> Cache.update(k, v, layer, kwargs=...) -> "videokv" attention(q, k, v, videokv=)
                        leaves a Turn in kwargs ------------------------^ writes, then attends

``update`` hands the new keys and values through untouched and leaves a ``Turn`` in the keyword
arguments of the layer; the attention function, registered as ``"videokv"``, writes them to the
cache and attends. Keys arrive after RoPE. Tokens of a forward become final at the start of the
next one, so chunked prefill is one forward per chunk; every query sees all earlier tokens and,
causally, those of its own forward.

    cache.py      CompressedCache      attention.py  the attention and mask functions
    models.py     which models are served, and how their attention is replaced and restored

This file alone imports no transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from videokv.adapters.transformers.cache import CompressedCache

__all__ = ["ADAPTER", "CompressedCache"]


class LanguageModels:
    """``compress`` finds language models here and says what serves them instead."""

    name = "transformers language models, through videokv.transformers.CompressedCache"

    def matches(self, model: Any) -> bool:
        """Whether the model is a causal language model of transformers."""
        bases = [f"{base.__module__}.{base.__name__}" for base in type(model).__mro__]
        return "transformers.modeling_utils.PreTrainedModel" in bases and any(
            base.endswith("ForCausalLM") for base in bases
        )

    def install(self, model: Any, new_cache: Callable[..., Any]) -> Callable[[], None]:
        """Raise: a language model takes its cache as an argument of each call."""
        raise ValueError(
            f"{type(model).__name__} takes its cache with each call: use "
            "cache = videokv.transformers.CompressedCache(model, recipe) and pass it as "
            "past_key_values= to the model or to generate"
        )


ADAPTER = LanguageModels()


def __getattr__(name: str) -> Any:
    if name == "CompressedCache":
        from videokv.adapters.transformers.cache import CompressedCache

        return CompressedCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
