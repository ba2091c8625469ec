"""The plain cache: dense keys and values in python lists. The oracle of every other cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["PlainCache"]

Pair = tuple[Tensor, Tensor]


class PlainCache:
    """Committed chunks of dense [B, H, T, D] keys and values, a window of them per layer.

    Args:
        layers: layers of the model.
        window_chunks: committed chunks that are kept; None keeps all.
        record_mass: also measure, in denoising passes, the attention mass on committed keys.

    Raises:
        ValueError: layers or window_chunks is not positive.
    """

    def __init__(
        self, *, layers: int, window_chunks: int | None, record_mass: bool = False
    ) -> None:
        if layers < 1 or (window_chunks is not None and window_chunks < 1):
            raise ValueError(
                f"layers and window_chunks must be positive, got {layers} and {window_chunks}"
            )
        self._chunks: list[list[Pair]] = [[] for _ in range(layers)]
        self._pending: dict[int, Pair] = {}
        self._window = window_chunks
        self._end_token = 0
        self._record = record_mass
        self._mass: list[tuple[int, int, Tensor]] = []

    def write(
        self, layer: int, start_token: int, key: Tensor, value: Tensor, query: Tensor
    ) -> None:
        """Hold a chunk's clean rows until commit; non-finite rows are refused."""
        if start_token != self._end_token:
            raise ValueError(
                f"layer {layer}: rows must start at token {self._end_token}, got {start_token}; "
                "commit each chunk before the next"
            )
        for name, rows in (("keys", key), ("values", value)):
            if not bool(torch.isfinite(rows).all()):
                raise ValueError(f"layer {layer}: {name} must be finite, got NaN or infinity")
        self._pending[layer] = (key.detach(), value.detach())

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """softmax(q kᵀ / √d) v over the committed chunks and the current rows."""
        chunks = self._chunks[layer]
        keys = torch.cat([pair[0] for pair in chunks] + [key], 2)
        values = torch.cat([pair[1] for pair in chunks] + [value], 2)
        if self._record and layer not in self._pending:
            mass = _cached_mass(query, keys, current_tokens=key.shape[2])
            self._mass.append((self._end_token, layer, mass))
        return F.scaled_dot_product_attention(query, keys, values)

    def commit(self, end_token: int) -> None:
        """Make the written chunk final and drop what has left the window."""
        missing = [layer for layer in range(len(self._chunks)) if layer not in self._pending]
        tokens = {pair[0].shape[2] for pair in self._pending.values()}
        if missing or tokens != {end_token - self._end_token}:
            raise ValueError(
                f"commit({end_token}) needs tokens {self._end_token}..{end_token} of every "
                f"layer, got {sorted(tokens)} tokens and nothing of layers {missing}"
            )
        for layer, pair in self._pending.items():
            self._chunks[layer].append(pair)
            if self._window is not None:
                del self._chunks[layer][: -self._window]
        self._pending = {}
        self._end_token = end_token

    def masses(self) -> list[tuple[int, int, Tensor]]:
        """(start token of the chunk, layer, mass [B]) of every recorded attention."""
        if not self._record:
            raise ValueError("no mass was recorded; make the cache with record_mass=True")
        return self._mass


def _cached_mass(query: Tensor, keys: Tensor, *, current_tokens: int) -> Tensor:
    """Mean over heads and queries of the softmax mass on all but the current keys, [B]."""
    scores = (query @ keys.mT).float() / query.shape[-1] ** 0.5
    cached = scores[..., : scores.shape[-1] - current_tokens]
    share = torch.exp(cached.logsumexp(-1) - scores.logsumexp(-1))
    return share.mean((1, 2))
