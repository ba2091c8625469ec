"""Language models of transformers: a cache that is compressed chunk by chunk, and its attention.

    model.forward -> Cache.update(k, v, layer, kwargs=...) -> "videokv" attention(q, k, v, videokv=)
                        leaves a Turn in kwargs ------------------------^ writes, then attends

``update`` hands the new keys and values through untouched and leaves a ``Turn`` in the keyword
arguments of the layer; the attention function, registered as ``"videokv"``, writes them to the
cache and attends. Keys arrive after RoPE. Tokens of a forward become final at the start of the
next one, so chunked prefill is one forward per chunk; every query sees all earlier tokens and,
causally, those of its own forward.

    cache.py      CompressedCache      attention.py  the attention and mask functions
    layers.py     its layers           models.py     which models are served; attention replaced
    generate.py   what videokv.compress does to a language model

This file alone imports no transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from videokv.adapters.transformers.cache import CompressedCache

__all__ = ["ADAPTER", "CompressedCache"]


class LanguageModels:
    """Inside ``compress``, each ``model.generate`` makes itself a ``CompressedCache``."""

    name = "transformers causal language models"

    def matches(self, model: Any) -> bool:
        """Whether the model is a causal language model of transformers."""
        bases = [f"{base.__module__}.{base.__name__}" for base in type(model).__mro__]
        return "transformers.modeling_utils.PreTrainedModel" in bases and any(
            base.endswith("ForCausalLM") for base in bases
        )

    def head_dims(self, model: Any) -> tuple[int, int] | None:
        """See ``models.head_dims``."""
        from videokv.adapters.transformers.models import head_dims

        return head_dims(model)

    def install(self, model: Any, new_cache: Callable[..., Any]) -> Callable[[], None]:
        """See ``generate.replace_generate``."""
        from videokv.adapters.transformers.generate import replace_generate

        return replace_generate(model, new_cache)


ADAPTER = LanguageModels()


def __getattr__(name: str) -> Any:
    if name == "CompressedCache":
        from videokv.adapters.transformers.cache import CompressedCache

        return CompressedCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
