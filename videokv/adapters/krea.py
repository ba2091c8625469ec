"""Krea realtime (krea-ai/realtime-video): the context is re-encoded for every block by a pass
with a block mask, which writes the cache and does not read it."""

from videokv.adapters.proxy import ProxyAdapter

ADAPTER = ProxyAdapter(
    name="Krea realtime",
    model_class=(("wan.modules.causal_model", "CausalWanModel"),),
    marks=("kv_cache", "get_block_mask", "cache_start"),
    snapshot=True,
    query_from="flex_attention",
)
