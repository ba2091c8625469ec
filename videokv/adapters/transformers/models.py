"""Which models are served, and how their attention function is replaced and restored."""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from videokv.adapters.served import Heads
from videokv.adapters.transformers.attention import NAME, attention, mask

# Attention that is not plain causal softmax over the keys that the cache was given.
OTHER_MODELS = {
    "diffllama": "values that it splits after they were cached",
    "doge": "a mask made from its values",
    "jetmoe": "keys that it repeats after they were cached",
}
OTHER_PARTS = {"attn_logit_softcapping": "capped scores", "sinks": "learnt sinks"}

FULL, WINDOW = "full_attention", "sliding_attention"  # as transformers calls them


@dataclass(frozen=True)
class Layers:
    """What the layers of a model are, for a cache.

    count: number of layers. windows: those that attend to a sliding window, with its size, where
    others attend to everything; they stay dense. limit: tokens up to which the layers of a model
    that has nothing but windows attend to everything, or None.
    """

    count: int
    windows: dict[int, int]
    limit: int | None = None


def check_model(model: PreTrainedModel) -> Layers:
    """The layers of a model, where all of them can be served; else ValueError."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"CompressedCache takes a transformers model, got {type(model).__name__}; for video "
            "models use videokv.compress"
        )
    config = model.config
    if getattr(config, "is_encoder_decoder", False) or config.get_text_config() is not config:
        raise ValueError(
            f"{type(model).__name__} is not a plain decoder (encoder-decoder or several models in "
            "one); pass its language model"
        )
    kinds = _kinds(config)
    _refuse_layers(config, kinds)
    _refuse_attention(model)
    windows = {layer: config.sliding_window for layer, kind in enumerate(kinds) if kind == WINDOW}
    if len(windows) == len(kinds):
        return Layers(len(kinds), {}, limit=config.sliding_window)
    return Layers(len(kinds), windows)


def heads(model: PreTrainedModel) -> tuple[Heads, ...]:
    """Those of the layers that are packed; () where the configuration does not say."""
    sizes, layers = head_dims(model), check_model(model)
    if sizes is None:
        return ()
    config, dtype = model.config, model.dtype
    counts = (_whole(config, "num_attention_heads"), _whole(config, "num_key_value_heads"))
    packed = [layer for layer in range(layers.count) if layer not in layers.windows]
    return tuple(Heads(layer, *sizes, *counts, dtype) for layer in packed)


def head_dims(model: PreTrainedModel) -> tuple[int, int] | None:
    """Channels of a key head and of a value head; None where the layers differ or do not say.

    Read from the configuration; with latent attention (DeepSeek) ``head_dim`` is its rotary part.
    """
    config = model.config
    rotary, plain, value = (
        _whole(config, f"{part}_head_dim") for part in ("qk_rope", "qk_nope", "v")
    )
    if rotary is not None:
        return None if plain is None or value is None else (plain + rotary, value)
    if _whole(config, "global_head_dim") is not None:
        return None
    size, heads = _whole(config, "head_dim"), _whole(config, "num_attention_heads")
    width = _whole(config, "hidden_size")
    if size is None and width and heads:
        size = width // heads
    return None if size is None else (size, size)


def _whole(config: Any, name: str) -> int | None:
    """A number of the configuration; None where it has none or a list of them."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


def _kinds(config: Any) -> list[str]:
    """The kind of each layer, in the words of transformers."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return list(kinds)
    window = getattr(config, "sliding_window", None)
    return [FULL if window is None else WINDOW] * config.num_hidden_layers


def _refuse_layers(config: Any, kinds: list[str]) -> None:
    wrong = [f"{i} ({kind})" for i, kind in enumerate(kinds) if kind not in (FULL, WINDOW)]
    if getattr(config, "kv_sharing_modes", None) is not None:
        wrong = [f"{i} ({mode})" for i, mode in enumerate(config.kv_sharing_modes)]
    if wrong:
        raise ValueError(
            "CompressedCache serves layers that attend to all earlier tokens or to a sliding "
            f"window of them; {config.model_type} has others: layers {', '.join(wrong)}"
        )


def _refuse_attention(model: PreTrainedModel) -> None:
    """What would be refused in the first forward is refused before it, naming the layers."""
    found: dict[str, list[int]] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or not hasattr(module, "is_causal"):
            continue
        parts = [
            what for name, what in OTHER_PARTS.items() if getattr(module, name, None) is not None
        ]
        if hasattr(module, "expand_kv"):  # latent attention in transformers 5
            parts.append("keys that are expanded after they were cached")
        if module.is_causal is False:
            parts.append("attention that is not causal (a decoder needs config.is_decoder)")
        for part in parts:
            found.setdefault(part, []).append(layer)
    wrong = [f"{part}: layers {', '.join(map(str, found[part]))}" for part in found]
    if other := OTHER_MODELS.get(model.config.model_type):
        wrong.append(other)
    if wrong:
        raise ValueError(
            "CompressedCache serves plain causal softmax attention; "
            f"{type(model).__name__} has {'; '.join(wrong)}"
        )


@dataclass
class Installation:
    """The attention a model came with, and how many caches have replaced it."""

    original: str
    users: int = 0


_installations: weakref.WeakKeyDictionary[PreTrainedModel, Installation] = (
    weakref.WeakKeyDictionary()
)


def install(model: PreTrainedModel) -> None:
    """Switch the model to our attention function; each call is undone by one ``uninstall``."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    current = model.config._attn_implementation
    installed = _installations.setdefault(model, Installation(current))
    if current != NAME:
        installed.original = current
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise ValueError(
                f"{type(model).__name__} does not let its attention function be set; "
                "CompressedCache cannot serve it"
            )
    installed.users += 1


def uninstall(model_ref: weakref.ref[PreTrainedModel]) -> None:
    """Undo one ``install``; the last one gives the model its own attention back."""
    model = model_ref()
    installed = None if model is None else _installations.get(model)
    if model is None or installed is None:
        return
    installed.users -= 1
    if installed.users <= 0:
        del _installations[model]
        if model.config._attn_implementation == NAME:
            model.set_attn_implementation(installed.original)


def check_installed(model: PreTrainedModel) -> None:
    """Raise ValueError where the model's attention was replaced since."""
    current = model.config._attn_implementation
    if current != NAME:
        raise ValueError(
            f"the attention of {type(model).__name__} is {current!r}, not {NAME!r}: it was set "
            "after this CompressedCache was made, or the cache was closed. Make a new cache"
        )


def cache_keyword(model: PreTrainedModel) -> str:
    """How this model's forward takes a cache: ``"cache"``, or ``"past_key_values"`` before 5.24."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
