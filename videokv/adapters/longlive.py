"""LongLive v1 and v2 (NVlabs/LongLive): attention over edited clones, rows written after all
blocks.

v2 with relative rotary embedding keeps keys before it; its FP4 cache is quantized already.
"""

from typing import Any

from videokv.adapters.proxy import ProxyAdapter


def relative(model: Any) -> bool:
    """Whether keys are cached before rotary embedding."""
    return bool(getattr(model, "use_relative_rope", False))


ADAPTER = ProxyAdapter(
    name="LongLive",
    model_class=(
        ("wan.modules.causal_model", "CausalWanModel"),
        ("wan_5b.modules.causal_model", "CausalWanModel"),
    ),
    marks=("kv_cache", "_apply_cache_updates"),
    rope="causal_rope_apply",
    pre_rope=relative,
)
