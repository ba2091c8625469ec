"""CausVid's contract: rows at absolute positions, start and end given, no index tensors, no
window."""

import torch

from . import common, self_forcing
from .common import rope


def attention(q, k, v, q_lens=None, k_lens=None, softmax_scale=None, causal=False):
    return common.dense(q, k, v, softmax_scale)


class CausalWanModel(self_forcing.CausalWanModel):
    def new_cache(self, rows, batch=1, dtype=torch.float32):
        made = super().new_cache(rows, batch, dtype)
        return [{name: layer[name] for name in "kv"} for layer in made]

    def _forward_inference(
        self, x, t, kv_cache=None, crossattn_cache=None, current_start=0, current_end=None
    ):
        shape, x = x.shape, x.flatten(2).transpose(1, 2) * (1 - t)
        end = current_start + x.shape[1]
        for block, cache in zip(self.blocks, kv_cache, strict=True):
            q, k, v = block.self_attn.qkv(x)
            cache["k"][:, current_start:end] = rope(k, current_start)
            cache["v"][:, current_start:end] = v
            out = attention(rope(q, current_start), cache["k"][:, :end], cache["v"][:, :end])
            x = x + block.self_attn.o(out.flatten(2))
        return x.transpose(1, 2).reshape(shape)


common.pose_as(__name__, "fake_causvid.causvid.models.wan.causal_model", CausalWanModel)
ROWS, SINK = 72, 0
