"""LongCat-Video's contract: a pass over the clean frames returns keys (normalized, not yet
rotated) and values of batch 1; each step repeats them for the guidance batch and rotates the
whole sequence."""

import torch
from torch import nn
from torch.nn import functional

from . import common
from .common import rope


class Rope(nn.Module):
    def forward(self, q, k, shape):
        return rope(q.transpose(1, 2)).transpose(1, 2), rope(k.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, width, heads, size):
        super().__init__()
        self.heads, self.size, self.scale, self.enable_bsa = heads, size, size**-0.5, False
        self.num_heads, self.head_dim = heads, size
        self.qkv, self.proj = nn.Linear(width, 3 * heads * size), nn.Linear(heads * size, width)
        self.rope_3d = Rope()

    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, self.heads, self.size)).permute(2, 0, 3, 1, 4)

    def _process_attn(self, q, k, v, shape):
        return functional.scaled_dot_product_attention(q, k, v, scale=self.scale)

    def out(self, x):
        return self.proj(x.transpose(1, 2).flatten(2))

    def forward(self, x, shape=None, num_cond_latents=None, return_kv=False):
        q, k, v = self.split(x)
        kept = (k.clone(), v.clone())
        q, k = self.rope_3d(q, k, shape)
        out = self.out(self._process_attn(q, k, v, shape))
        return (out, kept) if return_kv else out

    def forward_with_kv_cache(self, x, shape=None, num_cond_latents=None, kv_cache=None):
        q, k, v = self.split(x)
        old_k, old_v = (t.repeat(x.shape[0], 1, 1, 1) for t in kv_cache)
        k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
        q, k = self.rope_3d(torch.cat([torch.empty_like(old_k), q], 2), k, shape)
        return self.out(self._process_attn(q[:, :, old_k.shape[2] :], k, v, shape))


class Block(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.attn = Attention(*sizes)


class LongCatVideoTransformer3DModel(nn.Module):
    def __init__(self, layers=2, width=24, heads=3, size=16):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, size) for _ in range(layers))

    def forward(self, x, return_kv=False, kv_cache_dict=None, offload_kv_cache=False):
        kept = {}
        for index, block in enumerate(self.blocks):
            if kv_cache_dict:
                held = tuple(t.to(x.device) for t in kv_cache_dict[index])
                out = block.attn.forward_with_kv_cache(x, (1,), 1, kv_cache=held)
            else:
                out = block.attn(x, (1,), return_kv=return_kv)
            if return_kv:
                out, pair = out
                move = (lambda t: t.cpu()) if offload_kv_cache else (lambda t: t.contiguous())
                kept[index] = tuple(move(t) for t in pair)
            x = x + out
        return (x, kept) if return_kv else x


class Pipeline:
    def __init__(self, dit):
        self.dit, self.kv = dit, None

    def __call__(self, clean, noise, segments=3, steps=2):
        """Each segment re-encodes the last clean frames, then denoises with guidance."""
        made = []
        for _ in range(segments):
            _, self.kv = self.dit(clean, return_kv=True)
            x = noise
            for _ in range(steps):
                two = self.dit(torch.cat([x, x * 0.5]), kv_cache_dict=self.kv)
                x = torch.tanh(two[:1] * 1.5 - two[1:] * 0.5)
            made.append(x)
            clean = torch.cat([clean, x], 1)[:, -clean.shape[1] :]
        return torch.cat(made, 1)


common.pose_as(
    __name__, "fake.longcat_video.modules.longcat_video_dit", LongCatVideoTransformer3DModel
)
