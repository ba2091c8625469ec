"""What a model asks of a recipe, known before it runs, and the check of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from videokv.adapters.rotary import check_noise
from videokv.cache import CachePolicy, KVCache
from videokv.kernels.quantize_groups import DTYPES
from videokv.recipes import Recipe

PROBE_TOKENS = 64


@dataclass(frozen=True)
class Heads:
    """The attention heads of one layer.

    key_dim, value_dim: channels. queries, keys: their numbers, None where they are the same or not
    known. dtype: of the layer's weights, None where not known.
    """

    layer: int
    key_dim: int
    value_dim: int
    queries: int | None = None
    keys: int | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Served:
    """heads: of each layer; () where the model does not say, then its first write is checked.

    own_window: the model moves its window itself. turned_later: its keys are cached before rotary
    embedding, which turns adjacent pairs of channels.
    """

    heads: tuple[Heads, ...] = ()
    own_window: bool = False
    turned_later: bool = False


def heads_of(attentions: Iterable[Any], *, size: str, count: str) -> tuple[Heads, ...]:
    """Those of attention modules with as many key as query heads; () where one does not say.

    size, count: names of their attributes, channels of a head and number of heads.
    """
    found = []
    for layer, module in enumerate(attentions):
        channels, number = getattr(module, size, None), getattr(module, count, None)
        if not isinstance(channels, int) or not isinstance(number, int):
            return ()
        found.append(Heads(layer, channels, channels, number, number, weight_dtype(module)))
    return tuple(found)


def weight_dtype(module: Any) -> torch.dtype | None:
    """That of its first floating-point weights."""
    parameters = module.parameters() if isinstance(module, torch.nn.Module) else ()
    return next((p.dtype for p in parameters if p.is_floating_point()), None)


def check(recipe: Recipe, served: Served, *, name: str) -> None:
    """Raise ValueError where the model cannot be served with this recipe.

    name: of the model, for messages, which also say the layer, what was found and what to do.
    """
    if served.own_window:
        check_window(recipe)
    for heads in served.heads:
        try:
            _check_heads(recipe, heads)
        except ValueError as error:
            raise ValueError(f"{name}, layer {heads.layer}: {error}") from error
    if served.turned_later and recipe.correction is not None:
        for first in {(heads.key_dim, heads.value_dim): heads for heads in served.heads}.values():
            _check_turned(recipe, first)


def check_window(recipe: Any) -> None:
    """Raise ValueError where the recipe sets a window of its own."""
    if recipe.policy.window_chunks is not None:
        raise ValueError(
            f"window_chunks = {recipe.policy.window_chunks}: this model moves its window "
            "itself; leave window_chunks out of the recipe and set the model's own window"
        )


def _check_heads(recipe: Recipe, heads: Heads) -> None:
    recipe.check(heads.key_dim, value_head_dim=heads.value_dim)
    if heads.queries is not None and heads.keys and heads.queries % heads.keys:
        raise ValueError(
            f"{heads.queries} query heads are no multiple of {heads.keys} key heads; grouped "
            "attention needs that"
        )
    packs = recipe.keys is not None or recipe.values is not None
    # Weights of one byte are quantized; what they give is wider.
    if packs and heads.dtype not in (None, *DTYPES) and heads.dtype.itemsize > 1:
        raise ValueError(
            f"its weights are {heads.dtype}, and keys and values that are packed must be one of "
            f"{DTYPES}; convert the model, or use a recipe without quantizers"
        )


def _check_turned(recipe: Recipe, heads: Heads) -> None:
    """What noise the recipe gives shows in two small chunks of random rows."""
    cache = KVCache(dataclasses.replace(recipe, policy=CachePolicy()))
    generator = torch.Generator().manual_seed(0)
    for start in (0, PROBE_TOKENS):
        key, query = torch.randn(2, 1, 1, PROBE_TOKENS, heads.key_dim, generator=generator)
        value = torch.randn(1, 1, PROBE_TOKENS, heads.value_dim, generator=generator)
        cache.write(heads.layer, start, key, value, query)
        cache.commit(start + PROBE_TOKENS)
    for segment in cache.view(heads.layer):
        check_noise(segment.noise, layer=heads.layer)
