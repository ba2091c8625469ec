"""LingBot-World's contract: that of Self-Forcing, reached through helpers that take an object with
``read`` and ``write`` or a tensor, and a longest attention given with each call."""

from . import common, self_forcing
from .common import rope


def attention(q, k, v, q_lens=None, k_lens=None, softmax_scale=None, causal=False):
    return common.dense(q, k, v, softmax_scale)


def write(rows, first, last, x):
    if hasattr(rows, "write"):
        rows.write(first, last, x)
    else:
        rows[:, first:last] = x


def read(rows, first, last):
    return rows.read(first, last) if hasattr(rows, "read") else rows[:, first:last]


class WanModelFast(self_forcing.CausalWanModel):
    def _forward_inference(self, *args, **kwargs):
        raise NotImplementedError

    def forward(
        self,
        x,
        t,
        kv_cache=None,
        crossattn_cache=None,
        current_start=0,
        max_attention_size=10**6,
    ):
        shape, x = x.shape, x.flatten(2).transpose(1, 2) * (1 - t)
        for block, cache in zip(self.blocks, kv_cache, strict=True):
            layer = block.self_attn
            q, k, v = layer.qkv(x)
            end, sink = current_start + x.shape[1], layer.sink_size * layer.frame_tokens
            filled, capacity = cache["local_end_index"].item(), cache["k"].shape[1]
            new = end - cache["global_end_index"].item()
            gone = max(0, new + filled - capacity)
            if gone:
                for rows in (cache["k"], cache["v"]):
                    rows[:, sink : filled - gone] = rows[:, sink + gone : filled].clone()
            last = filled + new - gone
            write(cache["k"], last - x.shape[1], last, rope(k, current_start))
            write(cache["v"], last - x.shape[1], last, v)
            first = max(0, last - max_attention_size)
            pair = [read(cache[name], first, last) for name in "kv"]
            x = x + layer.o(attention(rope(q, current_start), *pair).flatten(2))
            cache["global_end_index"].fill_(end)
            cache["local_end_index"].fill_(last)
        return x.transpose(1, 2).reshape(shape)


common.pose_as(__name__, "fake_lingbot.wan.modules.model_fast", WanModelFast)
CausalWanModel, ROWS, SINK = WanModelFast, 48, 3
