"""Self-Forcing's contract: a dict a layer, rows rolled to the left behind a sink by the first
pass of a chunk, the same rows written by each step, index tensors beside them."""

import torch
from torch import nn

from . import common
from .common import Projections, rope


def attention(q, k, v, q_lens=None, k_lens=None, softmax_scale=None, causal=False):
    return common.dense(q, k, v, softmax_scale)


class SelfAttention(Projections):
    def __init__(self, width, heads, size, sink_size, frame_tokens, kv_heads=None):
        super().__init__(width, heads, size, kv_heads)
        self.sink_size, self.frame_tokens = sink_size, frame_tokens

    def forward(self, x, kv_cache, current_start):
        q, k, v = self.qkv(x)
        q, k = rope(q, current_start), rope(k, current_start)
        new, capacity = x.shape[1], kv_cache["k"].shape[1]
        end, sink = current_start + new, self.sink_size * self.frame_tokens
        seen, filled = kv_cache["global_end_index"].item(), kv_cache["local_end_index"].item()
        last = filled + end - seen
        if end > seen and new + filled > capacity:
            gone = new + filled - capacity
            kept = filled - gone - sink
            for name in "kv":
                rows = kv_cache[name]
                rows[:, sink : sink + kept] = rows[:, sink + gone : sink + gone + kept].clone()
            last -= gone
        kv_cache["k"][:, last - new : last] = k
        kv_cache["v"][:, last - new : last] = v
        out = attention(q, kv_cache["k"][:, :last], kv_cache["v"][:, :last])
        kv_cache["global_end_index"].fill_(end)
        kv_cache["local_end_index"].fill_(last)
        return self.o(out.flatten(2))


class Block(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.self_attn = SelfAttention(**sizes)


class CausalWanModel(nn.Module):
    def __init__(self, layers=2, width=24, heads=3, size=16, sink_size=0, frame_tokens=4, **more):
        super().__init__()
        sizes = dict(width=width, heads=heads, size=size, sink_size=sink_size, **more)
        self.blocks = nn.ModuleList(
            Block(frame_tokens=frame_tokens, **sizes) for _ in range(layers)
        )
        self.frame_tokens, self.width, self.size = frame_tokens, width, size
        self.kv_heads = self.blocks[0].self_attn.kv_heads

    def new_cache(self, rows, batch=1, dtype=torch.float32):
        return [
            {
                "k": torch.zeros(batch, rows, self.kv_heads, self.size, dtype=dtype),
                "v": torch.zeros(batch, rows, self.kv_heads, self.size, dtype=dtype),
                "global_end_index": torch.tensor([0]),
                "local_end_index": torch.tensor([0]),
            }
            for _ in self.blocks
        ]

    def forward(self, *args, **kwargs):
        return self._forward_inference(*args, **kwargs)

    def _forward_inference(
        self, x, t, kv_cache=None, crossattn_cache=None, current_start=0, cache_start=0
    ):
        """x: [B, C, F, tokens of a frame, 1]."""
        frames = x
        x = x.flatten(2).transpose(1, 2) * (1 - t)
        for block, cache in zip(self.blocks, kv_cache, strict=True):
            x = x + block.self_attn(x, cache, current_start)
        return x.transpose(1, 2).reshape(frames.shape)


class Pipeline:
    """The part of a pipeline that compress() touches."""

    def __init__(self, model, rows):
        self.generator, self.rows, self.kv_cache1 = model, rows, None

    def _initialize_kv_cache(self, batch_size, dtype, device):
        self.kv_cache1 = self.generator.new_cache(self.rows, batch_size, dtype)

    def __call__(self, noise, **how):
        if self.kv_cache1 is None:
            self._initialize_kv_cache(noise.shape[0], noise.dtype, noise.device)
        else:
            for cache in self.kv_cache1:
                cache["global_end_index"] = torch.tensor([0])
                cache["local_end_index"] = torch.tensor([0])
        return rollout(self.generator, self.kv_cache1, noise, **how)


def rollout(model, cache, noise, frames=3, steps=(0.7, 0.3), on_chunk=None):
    """Denoise chunk by chunk; the last, clean pass writes the rows once more."""
    made = []
    for first in range(0, noise.shape[2], frames):
        chunk = noise[:, :, first : first + frames]
        start = first * model.frame_tokens
        for t in (*steps, 0.0):
            out = model(chunk, t=t, kv_cache=cache, crossattn_cache=None, current_start=start)
            if t:
                chunk = torch.tanh(out) + 0.1 * t * chunk
        made.append(out)
        if on_chunk is not None:
            on_chunk(len(made), cache)
    return torch.cat(made, 2)


def noise(chunks=6, frames=3, frame_tokens=4, width=24, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, width, chunks * frames, frame_tokens, 1, generator=generator)


common.pose_as(__name__, "fake_self_forcing.wan.modules.causal_model", CausalWanModel)
