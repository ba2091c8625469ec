"""Rolling-Forcing's contract: a pass covers several blocks, only the first is cached; block 0 is
kept before rotary embedding and turned at each read, as if it lay right before the window."""

import torch

from . import common, self_forcing
from .common import rope


def attention(q, k, v, q_lens=None, k_lens=None, softmax_scale=None, causal=False):
    return common.dense(q, k, v, softmax_scale)


def causal_rope_apply(x, start_frame=0):
    return rope(x, start_frame)


class CausalWanModel(self_forcing.CausalWanModel):
    block_tokens = 12

    def attend(self, layer, x, cache, start, updating):
        q, k, v = layer.qkv(x)
        size, capacity = self.block_tokens, cache["k"].shape[1]
        turned = causal_rope_apply(k, start)
        seen, last = cache["global_end_index"].item(), cache["local_end_index"].item()
        new = start + size - seen
        if new > 0 and new + last > capacity:
            gone = new + last - capacity
            for name in "kv":
                rows = cache[name]
                rows[:, size : last - gone] = rows[:, size + gone : last].clone()
            last -= gone
        last += max(new, 0)
        first = last - size
        cache["k"][:, first:last] = (k if first == 0 else turned)[:, :size]
        cache["v"][:, first:last] = v[:, :size]
        if new > 0:
            cache["global_end_index"].fill_(start + size)
            cache["local_end_index"].fill_(last)
        q = causal_rope_apply(q, start)
        if first == 0:
            return attention(q, turned, v)
        if updating:
            keys = cache["k"][:, :last].clone()
            keys[:, :size] = causal_rope_apply(keys[:, :size], 0).type_as(v)
            return attention(q, keys, cache["v"][:, :last])
        working = cache["k"][:, size:first]
        anchor = causal_rope_apply(cache["k"][:, :size], start - working.shape[1] - size)
        keys = torch.cat([anchor.type_as(v), working, turned], dim=1)
        values = torch.cat([cache["v"][:, :size], cache["v"][:, size:first], v], dim=1)
        return attention(q, keys, values)

    def _forward_inference(
        self, x, t, updating_cache=False, kv_cache=None, crossattn_cache=None, current_start=0
    ):
        shape, x = x.shape, x.flatten(2).transpose(1, 2) * (1 - t)
        for block, cache in zip(self.blocks, kv_cache, strict=True):
            layer = block.self_attn
            x = x + layer.o(self.attend(layer, x, cache, current_start, updating_cache).flatten(2))
        return x.transpose(1, 2).reshape(shape)


def rollout(model, cache, noise, frames=3, on_chunk=None):
    latents, made = noise.clone(), []
    for first in range(0, noise.shape[2], frames):
        start, window = first * model.frame_tokens, slice(first, first + 3 * frames)
        out = model(latents[:, :, window], t=0.5, kv_cache=cache, current_start=start)
        latents[:, :, window] = torch.tanh(out)
        clean = latents[:, :, first : first + frames]
        done = model(clean, t=0.0, kv_cache=cache, current_start=start, updating_cache=True)
        made += [out, done]
    return torch.cat(made, 2)


common.pose_as(__name__, "fake_rolling.wan.modules.causal_model", CausalWanModel)
ROWS, SINK = 48, 0
