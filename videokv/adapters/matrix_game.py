"""Matrix-Game-2 (SkyworkAI/Matrix-Game): the caches of mouse and keyboard stay dense."""

from videokv.adapters.proxy import ProxyAdapter

ADAPTER = ProxyAdapter(
    name="Matrix-Game-2",
    model_class=(("wan.modules.causal_model", "CausalWanModel"),),
    marks=("kv_cache", "kv_cache_mouse", "kv_cache_keyboard"),
)
