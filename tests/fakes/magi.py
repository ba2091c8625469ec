"""MAGI-1's contract: one buffer [T B, Hkv, 2 D] a layer, several chunks in flight, those below
slice_point final; grouped heads; three quarters of the channels rotated in halves."""

from types import SimpleNamespace

import torch
from torch import nn

from . import common
from .common import Projections, dense


def rotate(x, start):
    """[T, H, D]: channels 0..3/8 D with 3/8..3/4 D."""
    part = x.shape[-1] * 3 // 8
    angle = (start + torch.arange(x.shape[0]))[:, None, None] * 50.0 ** (-torch.arange(part) / part)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b, rest = x[..., :part], x[..., part : 2 * part], x[..., 2 * part :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


class InferenceParams:
    def __init__(self, rows):
        self.max_batch_size, self.max_sequence_length = 1, rows
        self.key_value_memory_dict, self.update_kv_cache = {}, False


class FullyParallelAttention(Projections):
    def __init__(self, width, heads, size, kv_heads, layer):
        super().__init__(width, heads, size, kv_heads)
        self.layer_number = layer
        self.engine_config = SimpleNamespace(cp_strategy="none")
        self.model_config = SimpleNamespace(
            kv_channels=size, num_attention_heads=heads, num_query_groups=kv_heads
        )

    def adjust_key_and_value_for_inference(self, key_and_value, inference_params, meta_args):
        if inference_params is None:
            return torch.chunk(key_and_value, 2, dim=-1)
        memory = inference_params.key_value_memory_dict.setdefault(
            self.layer_number,
            key_and_value.new_zeros(inference_params.max_sequence_length, *key_and_value.shape[1:]),
        )
        start = meta_args.slice_point * meta_args.clip_token_nums
        old = memory[:start].clone()
        if inference_params.update_kv_cache:
            memory[start : start + key_and_value.shape[0]] = key_and_value
        return torch.chunk(torch.cat([old, key_and_value]), 2, dim=-1)

    def core_attention(self, query, key, value, bs, meta_args):
        out = []
        params = meta_args.core_attn_params
        for i in range(meta_args.denoising_range_num):
            q = query[slice(*params.np_q_range[i])]
            k, v = (x[slice(*params.np_k_range[i])] for x in (key, value))
            out.append(dense(q[None], k[None], v[None])[0])
        return torch.cat(out)

    def forward(self, x, inference_params, meta_args, start):
        q, k, v = self.qkv(x)
        q, k = rotate(q, start), rotate(k, start)
        k, v = self.adjust_key_and_value_for_inference(
            torch.cat([k, v], -1), inference_params, meta_args
        )
        return self.o(self.core_attention(q, k, v, 1, meta_args).flatten(1))


class Model(nn.Module):
    def __init__(self, layers=2, width=24, heads=6, size=16, kv_heads=2):
        super().__init__()
        self.layers = nn.ModuleList(
            FullyParallelAttention(width, heads, size, kv_heads, layer) for layer in range(layers)
        )

    def forward(self, x, params, meta, start):
        for layer in self.layers:
            x = x + layer(x, params, meta, start)
        return x


def rollout(model, noise, chunk=4, in_flight=2, steps=2, kv_range=None):
    """Chunks enter one by one; the first in flight becomes clean, is written, and leaves."""
    count = noise.shape[0] // chunk
    params, x, made = InferenceParams(noise.shape[0]), noise.clone(), []
    for point in range(count):
        last = min(point + in_flight, count)
        span = slice(point * chunk, last * chunk)
        for step in range(steps):
            clean = step == steps - 1
            meta = meta_of(point, last, chunk, clean=clean, kv_range=kv_range)
            params.update_kv_cache = True
            out = model(x[span], params, meta, point * chunk)
            if not clean:
                params.update_kv_cache = False
                free = model(x[span], None, meta_of(0, last - point, chunk), point * chunk)
                x[span] = torch.tanh(1.2 * out - 0.2 * free)
        made.append(out[:chunk])
    return torch.cat(made)


def meta_of(point, last, chunk, *, clean=True, kv_range=None):
    """What the model tells its attention; kv_range: chunks that each chunk sees, at most."""
    ends = [chunk * (i + 1) for i in range(point, last)]
    firsts = [0 if kv_range is None else max(0, end - kv_range * chunk) for end in ends]
    return SimpleNamespace(
        slice_point=point,
        denoising_range_num=last - point,
        extract_prefix_video_feature=False,
        fwd_extra_1st_chunk=clean,
        distill_nearly_clean_chunk=False,
        clip_token_nums=chunk,
        core_attn_params=SimpleNamespace(
            np_q_range=[[chunk * i, chunk * (i + 1)] for i in range(last - point)],
            np_k_range=list(zip(firsts, ends, strict=True)),
        ),
    )


common.pose_as(__name__, "fake.dit.dit_module", FullyParallelAttention)
