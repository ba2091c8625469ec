"""LingBot-World v1 and v2 (causal few-step models; two caches where guidance is on)."""

from videokv.adapters.proxy import ProxyAdapter

ADAPTER = ProxyAdapter(
    name="LingBot-World",
    model_class=(
        ("wan.modules.model_fast", "WanModelFast"),
        ("wan.modules.model_causal", "WanModelFast"),
    ),
    marks=("kv_cache", "max_attention_size"),
)
