"""Self-Forcing (guandeh17/Self-Forcing) and Causal-Forcing (thu-ml/Causal-Forcing)."""

from videokv.adapters.proxy import ProxyAdapter

ADAPTER = ProxyAdapter(
    name="Self-Forcing and Causal-Forcing",
    model_class=(("wan.modules.causal_model", "CausalWanModel"),),
    marks=("kv_cache", "crossattn_cache", "cache_start"),
    lacks=("updating_cache", "kv_cache_mouse", "_apply_cache_updates", "get_block_mask"),
)
