"""One step of attention, packed against dense, layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from videokv.cache import CachePolicy, KVCache
from videokv.cache.chunks import PackedChunk
from videokv.cache.layer import LayerState
from videokv.protocols import Segment


@dataclass(frozen=True)
class LayerError:
    """cache: number of the guidance branch. relative_error: norm of (packed - dense attention
    output) over the norm of the dense one, float32."""

    cache: int
    layer: int
    relative_error: float


def verify(caches: Iterable[KVCache], *, limit: float | None = None) -> tuple[LayerError, ...]:
    """Pack the newest dense rows of every layer once more, and attend to them both ways.

    The rows are those of the chunk in progress (or the newest recent chunk), with their queries, or
    where those are not kept their keys as queries. What is packed here is thrown away, the caches
    do not change. The recipe's correction is part of it. Layers come in order.

    Raises:
        ValueError: a layer has no dense rows, or its error is above ``limit``: the
            worst layers are named.
    """
    errors = tuple(
        LayerError(number, index, _error(cache, index, state))
        for number, cache in enumerate(caches)
        for index, state in cache.layer_states().items()
    )
    bad = [e for e in errors if limit is not None and not e.relative_error <= limit]
    if bad:
        worst = sorted(bad, key=lambda e: -e.relative_error)[:5]
        named = ", ".join(f"layer {e.layer} ({e.relative_error:.3g})" for e in worst)
        raise ValueError(
            f"attention over packed keys and values is further than {limit} from dense attention "
            f"in {len(bad)} of {len(errors)} layers: {named}; use more bits or another recipe"
        )
    return errors


def _error(cache: KVCache, layer: int, state: LayerState) -> float:
    keys, values, queries = _dense_rows(layer, state)
    plain = dataclasses.replace(
        cache.recipe,  # type: ignore[type-var]
        policy=CachePolicy(),
    )
    given = cache.options()["scale"]
    scale = float(given) if isinstance(given, float) else queries.shape[-1] ** -0.5
    packed = KVCache(plain, scale=scale)
    packed.restore({layer: LayerState(moment=state.moment)}, length=0)
    packed.write(layer, 0, keys, values, queries)
    packed.commit(keys.shape[2])
    with torch.autocast(queries.device.type, enabled=False):
        outputs = [
            cache.recipe.attend(queries, segments, scale=scale, causal=False, need_lse=False)[0]
            for segments in (packed.view(layer), [Segment(keys, values)])
        ]
    return _relative(*outputs)


def _dense_rows(layer: int, state: LayerState) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and queries of the newest rows that are not packed."""
    newest = state.tail or (state.chunks[-1] if state.chunks else None)
    if newest is None or isinstance(newest, PackedChunk):
        raise ValueError(
            f"layer {layer} has no dense rows to compare with: run at least one chunk first, or "
            "keep the newest one dense with recent_chunks=1"
        )
    queries = newest.keys if newest.queries is None else newest.queries
    return newest.keys, newest.values, queries


def _relative(output: Tensor, reference: Tensor) -> float:
    reference = reference.float()
    return float((output.float() - reference).norm() / reference.norm().clamp(min=1e-30))
