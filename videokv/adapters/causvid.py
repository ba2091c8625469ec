"""CausVid (tianweiy/CausVid): rows at absolute positions, no window."""

from videokv.adapters.proxy import ProxyAdapter

ADAPTER = ProxyAdapter(
    name="CausVid",
    model_class=(("causvid.models.wan.causal_model", "CausalWanModel"),),
    marks=("kv_cache", "current_end"),
)
