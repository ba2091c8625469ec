"""The cache: what is held for each layer, in which form, and for how long."""

from videokv.cache.cache import KVCache
from videokv.cache.mass import Mass
from videokv.cache.memory import Memory
from videokv.cache.policy import CachePolicy

__all__ = ["CachePolicy", "KVCache", "Mass", "Memory"]
