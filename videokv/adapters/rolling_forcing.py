"""Rolling-Forcing (long_video of thu-ml/Causal-Forcing): the first block is kept before rotary
embedding and rotated anew at each read; it is the sink and stays dense."""

from videokv.adapters.proxy import ProxyAdapter

ADAPTER = ProxyAdapter(
    name="Rolling-Forcing",
    model_class=(("wan.modules.causal_model", "CausalWanModel"),),
    marks=("kv_cache", "updating_cache"),
    rope="causal_rope_apply",
    sink_chunks=lambda model, frames: 1,
)
