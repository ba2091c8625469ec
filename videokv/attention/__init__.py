"""Attention over dense, packed and current keys with the correction of cached scores."""

from videokv.attention.choose import (
    Choice,
    attend,
    backend_names,
    explain_choice,
    load_backend,
)
from videokv.attention.merge import merge_parts

__all__ = [
    "Choice",
    "attend",
    "backend_names",
    "explain_choice",
    "load_backend",
    "merge_parts",
]
