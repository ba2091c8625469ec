"""The attention and the mask function that transformers calls under the name ``"videokv"``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from videokv.adapters.transformers.padding import is_key_mask, key_mask

if TYPE_CHECKING:
    from videokv.adapters.transformers.cache import CompressedCache

NAME = "videokv"
MARK = "_videokv_turn"


@dataclass(frozen=True)
class Turn:
    """What ``update`` passes to the attention function: whose turn it is to be written."""

    cache: CompressedCache
    layer: int


def hand_over(keys: Tensor, turn: Turn) -> Tensor:
    """The keys that ``update`` returns, with the turn; models hand them on as they are."""
    setattr(keys, MARK, turn)
    return keys


def _taken(keys: Tensor) -> Turn | None:
    """The turn that came with the keys; taken off, since the cache may keep the keys."""
    turn: Turn | None = vars(keys).pop(MARK, None)
    return turn


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function ``"videokv"``: query ``[B, Hq, M, D]`` -> ``[B, M, Hq, Dv]``."""
    turn = _taken(key)
    if turn is None:
        raise ValueError(
            "this model's attention belongs to a CompressedCache but the call brought none: pass "
            "it as past_key_values=, or give the model its own attention back with cache.close(). "
            f"(If you did pass it: {type(module).__name__} changes its keys after cache.update, "
            "which CompressedCache cannot serve)"
        )
    cache, layer = turn.cache, turn.layer
    _refuse_options(module, dropout, is_causal, kwargs, layer=layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layer in cache.window_layers:
        output = _window_attention(module, query, key, value, attention_mask, scale=scale)
        cache.finish(layer)
        return output, None
    tokens = cache.length_of(layer)
    _refuse_mask(attention_mask, kwargs, tokens, layer=layer, windowed=cache.limit is not None)
    output = cache.attend(layer, query, key, value, attention_mask, scale=scale)
    return output.transpose(1, 2).contiguous(), None


def mask(
    *,
    batch_size: int,
    kv_length: int,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function ``"videokv"``: None for plain causal attention, of padded batches
    ``[B, 1, 1, kv_length]`` (which keys are real), and aloud about anything else.

    local_size: window of sliding layers; their mask is SDPA's where they do not see everything.
    kwargs: for that, as this version of transformers names them.
    """
    if attention_mask is not None and bool(attention_mask.all()):
        attention_mask = None
    if local_size is not None and kv_length > local_size:
        found: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            **kwargs,
        )
        return found
    if local_size is None and mask_function is not causal_mask_function:
        raise ValueError(
            "CompressedCache serves plain causal attention; this model asks for another mask "
            "(blocks or packed sequences)"
        )
    first = int(kwargs.get("kv_offset", 0))
    return None if attention_mask is None else key_mask(attention_mask, first, kv_length)


def _window_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scale: float,
) -> Tensor:
    """A sliding layer, dense, by transformers' SDPA: ``[B, M, Hq, Dv]``."""
    rows, columns = query.shape[2], key.shape[2]
    padded = attention_mask is not None and is_key_mask(attention_mask, columns)
    if padded or (attention_mask is None and 1 < rows < columns):
        # SDPA's own causal mask starts at the left
        seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
        causal, itself = seen.tril(columns - rows), seen.triu(columns - rows)
        real = True if attention_mask is None else attention_mask
        attention_mask = causal & (real | itself)  # a pad sees itself, and is not NaN
    output: Tensor = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scale
    )[0]
    return output


def _refuse_mask(
    attention_mask: Tensor | None,
    others: dict[str, Any],
    tokens: int,
    *,
    layer: int,
    windowed: bool,
) -> None:
    """Packed layers see everything before them; windowed: the window is longer than that."""
    if attention_mask is not None and not is_key_mask(attention_mask, tokens):
        raise ValueError(
            f"layer {layer} brought a mask of its own {tuple(attention_mask.shape)}; "
            "CompressedCache serves plain causal attention and padding on the left"
        )
    if others.get("sliding_window") is not None and not windowed:
        raise ValueError(f"layer {layer} asks for sliding_window; CompressedCache cannot serve it")


def _refuse_options(
    module: torch.nn.Module,
    dropout: float,
    is_causal: bool | None,
    others: dict[str, Any],
    *,
    layer: int,
) -> None:
    """Whatever would be ignored is refused, naming the layer."""
    if dropout:
        raise ValueError(f"layer {layer} has attention dropout {dropout}; call model.eval()")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise ValueError(f"layer {layer} is not causal; CompressedCache serves causal attention")
    for option in ("softcap", "s_aux", "position_bias", "output_attentions"):
        given = others.get(option)
        if given is not None and given is not False:
            raise ValueError(f"layer {layer} asks for {option}; CompressedCache cannot serve it")
