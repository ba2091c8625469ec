"""What the fakes share: projections, interleaved rotary embedding, a plain attention."""

import sys

import torch
from torch import nn
from torch.nn import functional


def pose_as(module_name, name, *classes):
    """Let classes of a test module be found under the module name of a repository."""
    sys.modules[name] = sys.modules[module_name]
    for cls in classes:
        cls.__module__ = name


def seeded(module, seed=0, gain=1.0):
    """Random weights from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        size = parameter.shape[-1] ** -0.5 * gain
        parameter.data = torch.randn(parameter.shape, generator=generator) * size
    return module.requires_grad_(False)


def dense(q, k, v, scale=None):
    """[B, T, H, D] softmax attention, grouped heads too."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2).contiguous()


def rope(x, start=0, base=100.0):
    """Turn pairs (2i, 2i+1) of [B, T, H, D] by position start + t."""
    size = x.shape[-1]
    angle = (start + torch.arange(x.shape[1]))[:, None] * base ** (-torch.arange(0, size, 2) / size)
    cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Projections(nn.Module):
    def __init__(self, width, heads, size, kv_heads=None):
        super().__init__()
        self.heads, self.size, self.kv_heads = heads, size, kv_heads or heads
        self.num_heads, self.head_dim = heads, size
        self.q = nn.Linear(width, heads * size, bias=False)
        self.k = nn.Linear(width, self.kv_heads * size, bias=False)
        self.v = nn.Linear(width, self.kv_heads * size, bias=False)
        self.o = nn.Linear(heads * size, width, bias=False)

    def qkv(self, x):
        heads = (self.heads, self.kv_heads, self.kv_heads)
        return [
            f(x).unflatten(-1, (n, self.size))
            for f, n in zip((self.q, self.k, self.v), heads, strict=True)
        ]
