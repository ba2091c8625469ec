"""Language models: ``CompressedCache`` (needs the extra ``[transformers]``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from videokv.adapters.transformers import CompressedCache

__all__ = ["CompressedCache"]


def __getattr__(name: str) -> Any:
    if name == "CompressedCache":
        from videokv.adapters.transformers import CompressedCache

        return CompressedCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
