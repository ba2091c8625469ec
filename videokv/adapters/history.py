"""Models that re-encode their whole history for every chunk and read it in each denoising step.

    cache pass        History.write(layer, k, v, q)      once a layer; packed at the first read
    denoising steps   History.attend(layer, q, k, v)     history, then the current rows

The model stores a ``Handle`` where it stored a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from videokv.adapters.served import check_window
from videokv.adapters.store import attend_segments, made_anew
from videokv.cache import KVCache
from videokv.protocols import Segment


class History:
    """The cache of one guidance branch; every rebuild is one chunk, packed once.

    Query statistics are kept across rebuilds.
    """

    def __init__(self, make: Callable[[], KVCache]) -> None:
        self._make = make
        self.cache = make()
        check_window(self.cache.recipe)
        self._written: dict[int, int] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Rows of a cache pass, ``[B, Hkv, T, D]``; a second write of a layer begins a new one."""
        if layer in self._written or self.cache.length:
            self.cache = made_anew(self.cache, self._make, keep_statistics=True)
            self._written = {}
        self.cache.write(layer, 0, keys, values, queries)
        self._written[layer] = keys.shape[2]

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        before: Sequence[Segment] = (),
        scale: float | None = None,
    ) -> Tensor:
        """softmax over exact rows ``before``, the history and the current rows, in this order.

        query ``[B, Hq, M, D]``, keys ``[B, Hkv, N, D]``. A history of batch 1 serves every row
        of the batch.
        """
        self._finish()
        same_batch = query.shape[0] == self._batch(layer)
        packed = self.cache.recipe.keys is not None or self.cache.recipe.values is not None
        if same_batch and (packed or not before):
            # The order matters to no softmax; this way the cache bounds and reuses its workspace.
            exact = [*before, Segment(keys, values)]
            keys = torch.cat([part.keys for part in exact], 2)
            values = torch.cat([part.values for part in exact], 2)
            return self.cache.attend(layer, query, keys, values, scale=scale)
        return attend_segments(
            self.cache,
            layer,
            query,
            lambda source: [*before, *source.view(layer), Segment(keys, values)],
            scale=scale,
        )

    def _finish(self) -> None:
        """The cache pass is over when its rows are read."""
        if not self.cache.length:
            self.cache.commit(max(self._written.values(), default=0))

    def _batch(self, layer: int) -> int:
        layout = self.cache.layer_states()[layer].layout
        assert layout is not None
        return layout.batch


class Handle:
    """What the model holds in place of a layer's cached tensor ``[B, H, T, D]``."""

    def __init__(self, history: History, layer: int, like: Tensor) -> None:
        self.history = history
        self.layer = layer
        self.shape = like.shape
        self.dtype = like.dtype
        self.device = like.device

    def contiguous(self) -> Handle:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Handle:
        """It stays where it is; packed rows follow the model's device."""
        return self

    def cpu(self) -> Handle:
        raise ValueError(
            "offloading the cache to the CPU is not served: packed rows stay on the model's "
            "device; leave the model's own offloading of its cache off"
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"videokv's stand-in for a cached tensor has no {name!r}; a cache made inside "
            "videokv.compress serves inside it only: start the pipeline anew"
        )

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ValueError(
            f"torch.{getattr(function, '__name__', function)} on a cache made inside "
            "videokv.compress; it serves inside it only: start the pipeline anew"
        )
