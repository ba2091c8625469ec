"""What the adapters of diffusers models share: finding the model, its calls, its processors.

The library is never imported here; models are known by the names of their classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from videokv.adapters.served import Heads, weight_dtype

PIPELINE = ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline")


class Processor(Protocol):
    """What computes one attention module of a diffusers model."""

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor: ...


class OurProcessor:
    """Base of our processors, so that a model is not compressed twice.

    own: the processor that the model came with.
    """

    def __init__(self, own: Processor, layer: int) -> None:
        self.own = own
        self.layer = layer


def find_transformer(model: Any, module: str, name: str) -> Any:
    """The transformer of class ``module.name``: the model itself, or a pipeline's; None if not."""
    if _is_a(model, module, name):
        return model
    inner = getattr(model, "transformer", None) if _is_a(model, *PIPELINE) else None
    return inner if _is_a(inner, module, name) else None


def swap_processors(
    modules: Sequence[Any], make: Callable[[Processor, int], OurProcessor]
) -> Callable[[], None]:
    """Give each attention module our processor, ``make(own, layer)``; what is returned undoes it.

    Raises:
        ValueError: the model is compressed already.
    """
    own = [module.processor for module in modules]
    if any(isinstance(processor, OurProcessor) for processor in own):
        raise ValueError(
            "this model is inside another videokv.compress context already; leave that one first"
        )
    for layer, module in enumerate(modules):
        module.set_processor(make(own[layer], layer))

    def undo() -> None:
        for module, processor in zip(modules, own, strict=True):
            module.set_processor(processor)

    return undo


def diffusers_heads(attentions: Iterable[Any]) -> tuple[Heads, ...]:
    """Those of attention modules, from the widths of their projections."""
    found = []
    for layer, attn in enumerate(attentions):
        if getattr(attn, "fused_projections", False):
            key = value = attn.to_qkv.out_features // 3
        else:
            key, value = attn.to_k.out_features, attn.to_v.out_features
        dtype = weight_dtype(attn)
        found.append(Heads(layer, key // attn.heads, value // attn.heads, dtype=dtype))
    return tuple(found)


def arguments(model: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of one call of ``model`` by name, as hooks get them."""
    return dict(inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments)


def heads_first(rows: Tensor, heads: int) -> Tensor:
    """``[B, T, H * D] -> [B, H, T, D]``."""
    return rows.unflatten(2, (heads, -1)).transpose(1, 2)


def heads_last(rows: Tensor) -> Tensor:
    """``[B, H, T, D] -> [B, T, H * D]``."""
    return rows.transpose(1, 2).flatten(2, 3)


def projected_out(attn: Any, rows: Tensor) -> Tensor:
    """The output projection of a diffusers attention module (a linear layer, then dropout)."""
    for part in attn.to_out:
        rows = part(rows)
    return rows


def turn_pairs(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on neighbouring channels (2i, 2i + 1).

    rows ``[B, T, H, D]``; cos, sin broadcast to ``[B, T, H, D / 2]``.
    """
    first, second = rows.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.empty_like(rows)
    turned[..., 0::2] = first * cos - second * sin
    turned[..., 1::2] = first * sin + second * cos
    return turned


def _is_a(thing: Any, module: str, name: str) -> bool:
    """By the names of its classes."""
    return any((cls.__module__, cls.__name__) == (module, name) for cls in type(thing).__mro__)
