"""Two-bit KV caches for chunk-wise autoregressive video diffusion, with unbiased attention."""

__version__ = "0.1.0"
