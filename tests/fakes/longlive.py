"""LongLive's contract: attention over clones of the buffers, edited; sink and local window
joined; rows written after all blocks. v2's relative form keeps keys before rotary embedding."""

import torch

from . import common, self_forcing
from .common import rope


def attention(q, k, v, q_lens=None, k_lens=None, softmax_scale=None, causal=False):
    return common.dense(q, k, v, softmax_scale)


def causal_rope_apply(x, start_frame=0):
    return rope(x, start_frame)


class CausalWanModel(self_forcing.CausalWanModel):
    use_relative_rope = False

    def attend(self, layer, x, cache, start):
        q, k, v = layer.qkv(x)
        new, capacity, sink = x.shape[1], cache["k"].shape[1], layer.sink_size * layer.frame_tokens
        kept = k if self.use_relative_rope else causal_rope_apply(k, start)
        seen, filled = cache["global_end_index"].item(), cache["local_end_index"].item()
        last, gone = filled + start + new - seen, 0
        if start + new > seen and new + filled > capacity:
            gone = new + filled - capacity
            last -= gone
        clones = {name: cache[name].clone() for name in "kv"}
        self.update(clones, sink, gone, filled, last, kept, v)
        keys, values = (
            torch.cat([rows[:, :sink], rows[:, sink:last]], dim=1) for rows in clones.values()
        )
        if self.use_relative_rope:
            keys = causal_rope_apply(keys, 0).type_as(v)
            q = causal_rope_apply(q, last - new)
        else:
            q = causal_rope_apply(q, start)
        info = (cache, sink, gone, filled, last, kept, v, start + new)
        return attention(q, keys, values), info

    @staticmethod
    def update(rows, sink, gone, filled, last, k, v):
        if gone:
            for name in "kv":
                moved = rows[name][:, sink + gone : filled].clone()
                rows[name][:, sink : filled - gone] = moved
        rows["k"][:, last - k.shape[1] : last] = k
        rows["v"][:, last - k.shape[1] : last] = v

    def _apply_cache_updates(self, infos):
        for cache, *how, end in infos:
            self.update(cache, *how)
            cache["global_end_index"].fill_(end)
            cache["local_end_index"].fill_(how[3])

    def _forward_inference(self, x, t, kv_cache=None, crossattn_cache=None, current_start=0):
        shape, x, infos = x.shape, x.flatten(2).transpose(1, 2) * (1 - t), []
        for block, cache in zip(self.blocks, kv_cache, strict=True):
            out, info = self.attend(block.self_attn, x, cache, current_start)
            infos.append(info)
            x = x + block.self_attn.o(out.flatten(2))
        self._apply_cache_updates(infos)
        return x.transpose(1, 2).reshape(shape)


class RelativeModel(CausalWanModel):
    use_relative_rope = True


RelativeModel.__name__ = "CausalWanModel"
common.pose_as(__name__, "fake_longlive.wan.modules.causal_model", CausalWanModel, RelativeModel)
ROWS, SINK = 48, 3
