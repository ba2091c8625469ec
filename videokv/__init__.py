"""videokv: the KV cache of video world models at 2 bits, with attention kept unbiased.

Public names are looked up when first used, so that importing the package stays light.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "CachePolicy": "videokv.cache",
    "KVCache": "videokv.cache",
    "Mass": "videokv.cache",
    "Memory": "videokv.cache",
    "Recipe": "videokv.recipes",
    "bits_per_element": "videokv.recipes",
    "compress": "videokv.adapters",
    "load": "videokv.recipes",
    "recipe": "videokv.recipes",
    "save": "videokv.recipes",
}

if TYPE_CHECKING:
    from videokv.adapters import compress as compress
    from videokv.cache import CachePolicy as CachePolicy
    from videokv.cache import KVCache as KVCache
    from videokv.cache import Mass as Mass
    from videokv.cache import Memory as Memory
    from videokv.recipes import Recipe as Recipe
    from videokv.recipes import bits_per_element as bits_per_element
    from videokv.recipes import load as load
    from videokv.recipes import recipe as recipe
    from videokv.recipes import save as save

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """A public name, or a room (``videokv.recipes``), imported when it is first asked for."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
