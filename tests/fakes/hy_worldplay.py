"""HY-WorldPlay 8B's contract: a list of dicts with text and vision rows; a vision pass returns a
new list; a batch of two halves, whose second transforms queries, keys and values by the camera."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional

from . import common
from .common import Projections, rope


def get_parallel_state():
    return SimpleNamespace(sp_enabled=False)


def sequence_parallel_attention_vision(q, k, v, block_idx=None, kv_cache=None, cache_vision=False):
    q, k, v = (torch.cat(pair).transpose(1, 2) for pair in (q, k, v))
    held, made = kv_cache[block_idx], {}
    if cache_vision:
        made = {"k_vision": k, "v_vision": v}
    elif held["k_vision"] is not None:
        k = torch.cat([held["k_vision"], k], 2)
        v = torch.cat([held["v_vision"], v], 2)
    k = torch.cat([held["k_txt"].repeat_interleave(2, 0), k], 2)
    v = torch.cat([held["v_txt"].repeat_interleave(2, 0), v], 2)
    out = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return *out.chunk(2), made


class Transformer(nn.Module):
    def __init__(self, layers=2, width=24, heads=3, size=16):
        super().__init__()
        self.attn = nn.ModuleList(Projections(width, heads, size) for _ in range(layers))
        self.hidden_size, self.heads_num, self.double_blocks = heads * size, heads, [*self.attn]

    def text(self, prompt):
        """[B, S, width] -> a cache whose text rows are filled."""
        made = []
        for attn in self.attn:
            _, k, v = (x.transpose(1, 2) for x in attn.qkv(prompt))
            made.append({"k_txt": k, "v_txt": v, "k_vision": None, "v_vision": None})
        return made

    def forward(self, x, camera, kv_cache, cache_vision=False, start=0):
        new = []
        for index, attn in enumerate(self.attn):
            q, k, v = attn.qkv(x)
            pairs = [(rope(q, start), q * camera), (rope(k, start), k / camera), (v, v * camera)]
            out, prope, made = sequence_parallel_attention_vision(
                *pairs, block_idx=index, kv_cache=kv_cache, cache_vision=cache_vision
            )
            new.append({**kv_cache[index], **made})
            x = x + attn.o(out + prope / camera.mean())
        return new if cache_vision else x


class Pipeline:
    def __init__(self, transformer):
        self.transformer = transformer

    def __call__(self, prompt, noise, chunks=3, steps=2):
        pos, neg = self.transformer.text(prompt), self.transformer.text(-prompt)
        past, made = None, []
        for chunk in range(chunks):
            camera = torch.tensor(1.5 + 0.1 * chunk)
            start = 0
            if past is not None:  # all frames so far are retrieved
                start = past.shape[1]
                pos = self.transformer(past, camera, pos, cache_vision=True)
                neg = self.transformer(past, camera, neg, cache_vision=True)
            x = noise[:, chunk * 4 : chunk * 4 + 4]
            for _ in range(steps):
                good = self.transformer(x, camera, pos, start=start)
                bad = self.transformer(x, camera, neg, start=start)
                x = torch.tanh(1.5 * good - 0.5 * bad)
            made.append(x)
            past = torch.cat(made, 1)
        return past


common.pose_as(__name__, "fake.models.transformers.worldplay_1_5_transformer", Transformer)
