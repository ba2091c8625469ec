"""``videokv.compress`` on a language model: ``generate`` makes itself a ``CompressedCache``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from videokv.adapters import NewCache
from videokv.adapters.transformers.cache import CompressedCache
from videokv.adapters.transformers.models import (
    cache_keyword,
    check_model,
    install,
    uninstall,
)

METHOD = "generate"


def replace_generate(model: PreTrainedModel, new_cache: NewCache) -> Callable[[], None]:
    """Give calls of ``model.generate`` that bring no cache one of ``new_cache``; returns the undo.

    A forward that is called by hand must bring its own ``CompressedCache``; without one it is
    refused, since nothing of it would be compressed.

    Raises:
        ValueError: the model cannot be served.
    """
    check_model(model)
    own = vars(model).get(METHOD)
    plain: Callable[..., Any] = getattr(model, METHOD)
    keyword = cache_keyword(model)

    @functools.wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get(name) is not None for name in ("cache", "past_key_values")):
            return plain(*args, **kwargs)
        with CompressedCache.made_by(model, new_cache) as cache:
            return plain(*args, **{**kwargs, keyword: cache})

    install(model)
    setattr(model, METHOD, generate)

    def undo() -> None:
        if own is None:
            delattr(model, METHOD)
        else:
            setattr(model, METHOD, own)
        uninstall(weakref.ref(model))

    return undo
