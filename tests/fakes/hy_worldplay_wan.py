"""The contract of HY-WorldPlay's Wan variant: a processor that caches rotary and ProPE rows side
by side in [B, H, S, 2 D] and attends to both as one batch."""

import torch
from torch import nn
from torch.nn import functional

from . import common
from .common import Projections, rope


def sageattn(q, k, v, tensor_layout="HND", is_causal=False):
    return functional.scaled_dot_product_attention(q, k, v)


class CausalCameraPRopeWanAttnProcessor2_0:
    def __call__(self, attn, x, kv_cache=None, is_cache=False, camera=1.0, start=0):
        q, k, v = attn.qkv(x)
        pairs = [(rope(q, start), q * camera), (rope(k, start), k / camera), (v, v * camera)]
        q, k, v = ([t.transpose(1, 2) for t in pair] for pair in pairs)
        kept = {}
        if kv_cache["v"] is not None and not is_cache:
            k = [torch.cat([a, b], -2) for a, b in zip(kv_cache["k"].chunk(2, -1), k, strict=True)]
            v = [torch.cat([a, b], -2) for a, b in zip(kv_cache["v"].chunk(2, -1), v, strict=True)]
        if is_cache:
            kept = {"k": torch.cat(k, -1), "v": torch.cat(v, -1)}
        out = sageattn(torch.cat(q), torch.cat(k), torch.cat(v), tensor_layout="HND")
        out, prope = out.transpose(1, 2).flatten(2).chunk(2)
        return attn.o(out + prope / camera), kept


class Attention(Projections):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.processor = CausalCameraPRopeWanAttnProcessor2_0()


class Transformer(nn.Module):
    def __init__(self, layers=2, width=24, heads=3, size=16):
        super().__init__()
        self.attn = nn.ModuleList(Attention(width, heads, size) for _ in range(layers))
        self.attention_head_dim = size

    def forward(self, x, kv_cache, is_cache=False, **more):
        new = []
        for attn, held in zip(self.attn, kv_cache, strict=True):
            out, kept = attn.processor(attn, x, kv_cache=held, is_cache=is_cache, **more)
            new.append(kept)
            x = x + out
        return new if is_cache else x


class Pipeline:
    def __init__(self, transformer):
        self.transformer = transformer

    def __call__(self, prompt, noise, chunks=3, steps=2):
        cache = [{"k": None, "v": None} for _ in self.transformer.attn]
        past, made = None, []
        for chunk in range(chunks):
            start = 0 if past is None else past.shape[1]
            if past is not None:
                cache = self.transformer(past, cache, is_cache=True, camera=1.5)
            x = noise[:, chunk * 4 : chunk * 4 + 4] + prompt.mean()
            for _ in range(steps):
                x = torch.tanh(self.transformer(x, cache, camera=1.5, start=start))
            made.append(x)
            past = torch.cat(made, 1)
        return past


common.pose_as(__name__, "fake.dits.arwan_w_action_w_mem_relative_rope", Transformer)
