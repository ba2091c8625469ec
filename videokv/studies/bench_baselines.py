"""What others offer, each imported when it is measured and never shipped here."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from videokv.studies.bench import Unavailable

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def dense_attentions(device: torch.device) -> dict[str, Attention]:
    """Stock attention of ``[B, H, M, D]`` by name; a missing one raises Unavailable when called."""
    if device.type != "cuda":
        return {"sdpa": _sdpa}
    return {"cudnn": _cudnn, "fa2": _fa2, "flex": _flex, "fa4": _fa4}


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    return functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=repeats > 1)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _sdpa(q, k, v, scale)


def _fa2(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _sdpa(q, k, v, scale)


def _flex(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return _compiled_flex()(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@functools.lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _fa4(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    from videokv.attention.stock_kernels import KERNELS, has_fa4

    if not has_fa4():
        raise Unavailable("flash-attn-4 is not installed")
    return KERNELS["fa4"](q, k, v, scale, False)[0]


class QuantVideoGen:
    """The package ``quant-videogen``: its own compress and uncompress, 2 bits."""

    def __init__(self, *, centroids: int, iterations: int) -> None:
        if importlib.util.find_spec("quant_videogen") is None:
            raise Unavailable("quant-videogen is not installed")
        from quant_videogen import (  # type: ignore[import-not-found]
            QuantizeConfig,
            compress_kv_cache,
            get_quantize_fn,
            uncompress_kv_cache,
        )

        kind = "triton-nstages-kmeans-int2"
        self._config = QuantizeConfig(
            quant_type=kind,
            cache_num_k_centroids=centroids,
            cache_num_v_centroids=centroids,
            kmeans_max_iters=iterations,
            quant_block_size=64,
            num_prq_stages=1,
        )
        self._kind = kind
        self._function = get_quantize_fn(kind, self._config)
        self._compress, self._uncompress = compress_kv_cache, uncompress_kv_cache

    def compress(self, keys: Tensor, values: Tensor) -> tuple[Any, Any]:
        """Their packed state of keys and values ``[B, H, T, D]``."""
        packed = self._compress(keys, values, self._kind, self._config, self._function)
        for side in packed:
            side.setdefault("info", {"quant_config": self._config, "output_dtype": keys.dtype})
        return packed[0], packed[1]

    def uncompress(self, packed: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
        """Keys and values again."""
        keys, values = self._uncompress(*packed)
        return keys, values
