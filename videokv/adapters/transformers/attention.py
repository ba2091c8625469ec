"""The attention and the mask function that transformers calls under the name ``"videokv"``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

if TYPE_CHECKING:
    from videokv.adapters.transformers.cache import CompressedCache

NAME = "videokv"


@dataclass(frozen=True)
class Turn:
    """What ``update`` passes to the attention function: whose turn it is to be written."""

    cache: CompressedCache
    layer: int


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    videokv: Turn | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function ``"videokv"``: query ``[B, Hq, M, D]`` -> ``[B, M, Hq, Dv]``."""
    if videokv is None:
        raise ValueError(
            "this model's attention belongs to a CompressedCache but the call brought none: pass "
            "it as past_key_values=, or give the model its own attention back with cache.close()"
        )
    cache, layer = videokv.cache, videokv.layer
    _refuse_options(module, dropout, is_causal, kwargs, layer=layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layer in cache.window_layers:
        output = _window_attention(module, query, key, value, attention_mask, scale=scale)
        cache.finish(layer)
        return output, None
    _refuse_mask(attention_mask, kwargs, layer=layer, windowed=cache.limit is not None)
    output = cache.attend(layer, query, key, value, scale=scale)
    return output.transpose(1, 2).contiguous(), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function ``"videokv"``: None for plain causal attention, aloud about anything else.

    local_size: window of sliding layers; their mask is SDPA's where they do not see everything.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            "CompressedCache takes no padding: the attention mask has zeros; run sequences of "
            "one length in a batch, or each alone"
        )
    if local_size is not None:
        if kv_length <= local_size:
            return None
        found: Tensor | None = sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            **kwargs,
        )
        return found
    if mask_function is not causal_mask_function:
        raise ValueError(
            "CompressedCache serves plain causal attention; this model asks for another mask "
            "(blocks or packed sequences)"
        )
    return None


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
    if attention_mask is None and 1 < rows < columns:  # SDPA's own causal mask starts at the left
        seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
        attention_mask = seen.tril(columns - rows)[None, None]
    output: Tensor = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scale
    )[0]
    return output


def _refuse_mask(
    attention_mask: Tensor | None, others: dict[str, Any], *, layer: int, windowed: bool
) -> None:
    """Packed layers see everything before them; windowed: the window is longer than that."""
    if attention_mask is not None:
        raise ValueError(
            f"layer {layer} brought a mask of its own {tuple(attention_mask.shape)}; "
            "CompressedCache serves plain causal attention only"
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
