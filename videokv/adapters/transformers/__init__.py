"""Language models of transformers: a cache that is compressed chunk by chunk, and its attention.

    model.forward -> Cache.update(k, v, layer) -> "videokv" attention(q, k, v)
                        marks k with a Turn ------^ takes the Turn, writes, then attends

``update`` hands the new keys and values through untouched and marks the keys with a ``Turn``; the
attention function, registered as ``"videokv"``, takes it, writes the rows to the cache and attends.
(Keyword arguments reach both in the newest transformers only.) Keys arrive after RoPE. Tokens of a
forward become final at the start of the next one, so chunked prefill is one forward per chunk;
every query sees all earlier tokens and, causally, those of its own forward.

    cache.py      CompressedCache      attention.py  the attention and mask functions
    layers.py     its layers           models.py     which models are served; attention replaced
    padding.py    batches padded on the left
    generate.py   what videokv.compress does to a language model

This file alone imports no transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from videokv.adapters.served import Served

if TYPE_CHECKING:
    from videokv.adapters.transformers.cache import CompressedCache

__all__ = ["ADAPTER", "CompressedCache"]

OLDEST = (4, 56)


def check_version() -> None:
    """Raise ValueError where transformers is older than what the adapter is made for."""
    found = version("transformers")
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST:
        raise ValueError(
            f"videokv serves language models of transformers {OLDEST[0]}.{OLDEST[1]} and later, "
            f"this is {found}: pip install -U transformers"
        )


class LanguageModels:
    """Inside ``compress``, each ``model.generate`` makes itself a ``CompressedCache``."""

    name = "transformers causal language models"

    def matches(self, model: Any) -> bool:
        """Whether the model is a causal language model of transformers."""
        bases = [f"{base.__module__}.{base.__name__}" for base in type(model).__mro__]
        return "transformers.modeling_utils.PreTrainedModel" in bases and any(
            base.endswith("ForCausalLM") for base in bases
        )

    def served(self, model: Any) -> Served:
        """See ``models.heads``."""
        check_version()
        from videokv.adapters.transformers.models import heads

        return Served(heads(model))

    def install(self, model: Any, new_cache: Callable[..., Any]) -> Callable[[], None]:
        """See ``generate.replace_generate``."""
        check_version()
        from videokv.adapters.transformers.generate import replace_generate

        return replace_generate(model, new_cache)


ADAPTER = LanguageModels()


def __getattr__(name: str) -> Any:
    if name == "CompressedCache":
        check_version()
        from videokv.adapters.transformers.cache import CompressedCache

        return CompressedCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
