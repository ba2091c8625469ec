"""Krea realtime's contract: integers for indices; before each block the context is encoded anew
by a pass with a block mask, which writes rows 0.. and attends without the cache."""

import torch
from torch.nn import functional

from . import common, self_forcing
from .common import rope


def attention(q, k, v, q_lens=None, k_lens=None, softmax_scale=None, causal=False):
    return common.dense(q, k, v, softmax_scale)


def flex_attention(query, key, value, block_mask=None):
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=block_mask)


def get_block_mask(tokens, block):
    number = torch.arange(tokens) // block
    return number[:, None] >= number[None]


class CausalWanModel(self_forcing.CausalWanModel):
    block_mask = None

    def new_cache(self, rows, batch=1, dtype=torch.float32):
        made = super().new_cache(rows, batch, dtype)
        return [layer | {"global_end_index": 0, "local_end_index": 0} for layer in made]

    def _forward_inference(
        self, x, t, kv_cache=None, crossattn_cache=None, current_start=0, cache_start=0
    ):
        shape, x = x.shape, x.flatten(2).transpose(1, 2) * (1 - t)
        for block, cache in zip(self.blocks, kv_cache, strict=True):
            q, k, v = block.self_attn.qkv(x)
            q, k = rope(q, current_start), rope(k, current_start)
            new = x.shape[1]
            if self.block_mask is not None:
                cache["k"][:, :new] = k
                cache["v"][:, :new] = v
                last = new
                q, k, v = (y.transpose(1, 2) for y in (q, k, v))
                out = flex_attention(q, k, v, block_mask=self.block_mask).transpose(1, 2)
            else:
                last = cache["local_end_index"] + current_start + new - cache["global_end_index"]
                cache["k"][:, last - new : last] = k
                cache["v"][:, last - new : last] = v
                out = attention(q, cache["k"][:, :last], cache["v"][:, :last])
            cache["global_end_index"] = current_start + new
            cache["local_end_index"] = last
            x = x + block.self_attn.o(out.flatten(2))
        return x.transpose(1, 2).reshape(shape)


def rollout(model, cache, noise, frames=3, on_chunk=None):
    context, made = noise[:, :, :0], []
    for first in range(0, noise.shape[2], frames):
        start = context.shape[2] * model.frame_tokens
        if start:
            model.block_mask = get_block_mask(start, model.frame_tokens)
            model(context, t=0.0, kv_cache=cache, current_start=0)
            model.block_mask = None
        chunk = noise[:, :, first : first + frames]
        for t in (0.7, 0.3):
            chunk = torch.tanh(model(chunk, t=t, kv_cache=cache, current_start=start))
        made.append(chunk)
        context = torch.cat([context, chunk], 2)[:, :, -2 * frames :]
    return torch.cat(made, 2)


common.pose_as(__name__, "fake_krea.wan.modules.causal_model", CausalWanModel)
ROWS, SINK = 36, 0
