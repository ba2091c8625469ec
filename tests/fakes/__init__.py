"""Clean-room stand-ins of the cache contracts of video models: just the attention layers, written
from descriptions of how each model keeps its cache. Tiny random weights, no upstream code."""
