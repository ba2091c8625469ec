"""videokv: the KV cache of video world models at 2 bits, with attention kept unbiased."""

__version__ = "0.1.0"
