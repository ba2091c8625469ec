"""Language models: ``CompressedCache`` (needs the extra ``[transformers]``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from videokv.adapters.transformers.cache import CompressedCache

__all__ = ["CompressedCache"]


def __getattr__(name: str) -> Any:
    if name != "CompressedCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from videokv.adapters.transformers import CompressedCache
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(
            "CompressedCache needs transformers: pip install 'videokv[transformers]'"
        ) from error
    return CompressedCache
