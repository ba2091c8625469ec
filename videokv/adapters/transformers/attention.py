"""The attention and the mask function that transformers calls under the name ``"videokv"``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

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
    _refuse_options(module, attention_mask, dropout, is_causal, kwargs, layer=videokv.layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = videokv.cache.attend(videokv.layer, query, key, value, scale=scale)
    return output.transpose(1, 2).contiguous(), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> None:
    """The mask function ``"videokv"``: plain causal (None), and aloud about anything else."""
    if mask_function is not causal_mask_function:
        raise ValueError(
            "CompressedCache serves plain causal attention; this model asks for another mask "
            "(sliding window, blocks or packed sequences)"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            "CompressedCache takes no padding: the attention mask has zeros; run sequences of "
            "one length in a batch, or each alone"
        )


def _refuse_options(
    module: torch.nn.Module,
    attention_mask: Tensor | None,
    dropout: float,
    is_causal: bool | None,
    others: dict[str, Any],
    *,
    layer: int,
) -> None:
    """Whatever would be ignored is refused, naming the layer."""
    if attention_mask is not None:
        raise ValueError(
            f"layer {layer} brought a mask of its own {tuple(attention_mask.shape)}; "
            "CompressedCache serves plain causal attention only"
        )
    if dropout:
        raise ValueError(f"layer {layer} has attention dropout {dropout}; call model.eval()")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise ValueError(f"layer {layer} is not causal; CompressedCache serves causal attention")
    for option in ("sliding_window", "softcap", "s_aux", "position_bias", "output_attentions"):
        given = others.get(option)
        if given is not None and given is not False:
            raise ValueError(f"layer {layer} asks for {option}; CompressedCache cannot serve it")
