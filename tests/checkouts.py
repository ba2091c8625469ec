"""Runs a real checkout of a video model on the CPU, tiny and with random weights, without and with
``videokv.compress``, and prints what came out as JSON.

    python tests/checkouts.py FAMILY PATH

Each family in a process of its own: the repositories use the same top-level names.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

import videokv

LAYERS, HEADS, SIZE, TEXT = 2, 2, 32, 8
HEIGHT = WIDTH = 4  # latent, before patches of 2 x 2
RECIPES = ("bf16", "rtn-2bit+calibrated", "rtn-4bit", "rtn-8bit")


def dense_attention(q, k, v, *args, softmax_scale=None, **options):
    """[B, T, H, D]; the flash kernels of the repositories need a GPU."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, scale=softmax_scale)
    return out.transpose(1, 2).contiguous()


def hollow_packages(root, *names):
    """Packages whose __init__ is not run (they load text encoders or touch CUDA)."""
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = [str(Path(root, *name.split(".")))]
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)


def random_weights(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        size = 1.0 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
        parameter.data = torch.randn(parameter.shape, generator=generator) * size
    return model.eval().requires_grad_(False).to(torch.bfloat16)


@dataclass
class WanKin:
    """A model of the Self-Forcing kin and how its pipeline calls it."""

    module: str
    packages: tuple[str, ...]
    rows_frames: int
    options: dict
    name: str = "CausalWanModel"
    frames: int = 3
    chunks: int = 5
    integers: bool = False
    dtype = torch.bfloat16

    def load(self, root):
        sys.path.insert(0, str(root))
        hollow_packages(root, *self.packages)
        module = importlib.import_module(self.module)
        base = importlib.import_module(module.WanRMSNorm.__module__)
        base.flash_attention = dense_attention
        if hasattr(module, "flash_attention"):
            module.flash_attention = dense_attention
        self.code = module
        return self.tiny(getattr(module, self.name))

    def tiny(self, cls):
        sizes = dict(dim=HEADS * SIZE, ffn_dim=64, freq_dim=32, text_dim=16, text_len=TEXT)
        sizes |= dict(in_dim=4, out_dim=4, num_heads=HEADS, num_layers=LAYERS)
        return random_weights(cls(**sizes, **self.options))

    @property
    def frame_tokens(self):
        return HEIGHT * WIDTH // 4

    def new_cache(self):
        shape = (1, self.rows_frames * self.frame_tokens, HEADS, SIZE)
        index = (lambda: 0) if self.integers else (lambda: torch.tensor([0]))
        return [
            {
                "k": torch.zeros(shape, dtype=self.dtype),
                "v": torch.zeros(shape, dtype=self.dtype),
                "global_end_index": index(),
                "local_end_index": index(),
            }
            for _ in range(LAYERS)
        ]

    def new_text_cache(self):
        return [{"is_init": False, "k": None, "v": None} for _ in range(LAYERS)]

    def call(self, model, chunk, t, start, cache, text_cache, **more):
        generator = torch.Generator().manual_seed(5)
        context = torch.randn(TEXT, 16, generator=generator).to(self.dtype)
        out = model(
            chunk,
            t=torch.full((1, chunk.shape[2]), t),
            context=[context],
            seq_len=10**6,
            kv_cache=cache,
            crossattn_cache=text_cache,
            current_start=start * self.frame_tokens,
            **more,
        )
        return out if isinstance(out, torch.Tensor) else torch.stack(list(out))

    def rollout(self, model, cache):
        noise = noise_of(self.frames * self.chunks)
        text_cache, made = self.new_text_cache(), []
        for first in range(0, noise.shape[2], self.frames):
            chunk = noise[:, :, first : first + self.frames]
            for t in (900.0, 500.0, 0.0):
                out = self.call(model, chunk, t, first, cache, text_cache, **self.more(first))
                chunk = (chunk - 0.5 * out).tanh() if t else chunk
            made.append(out)
        return torch.cat(made, 2)

    def more(self, first):
        """Other arguments of a pass."""
        return {"cache_start": None}


def noise_of(frames, height=HEIGHT, width=WIDTH):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 4, frames, height, width, generator=generator).bfloat16()


class CausVid(WanKin):
    def more(self, first):
        return {"current_end": (first + self.frames) * self.frame_tokens}


class Rolling(WanKin):
    """Windows of up to four blocks at falling noise; the first block is cached when it is clean."""

    def tiny(self, cls):
        model = super().tiny(cls)
        for block in model.blocks:
            attention = block.self_attn
            attention.frame_length = self.frame_tokens
            attention.max_attention_size = 21 * self.frame_tokens
            attention.block_length = self.frames * self.frame_tokens
        return model

    def rollout(self, model, cache):
        latents = noise_of(self.frames * self.chunks)
        text_cache, made = self.new_text_cache(), []
        for first in range(0, latents.shape[2], self.frames):
            window = latents[:, :, first : first + 4 * self.frames]
            out = self.call(model, window, 500.0, first, cache, text_cache, cache_start=None)
            latents = latents.clone()
            latents[:, :, first : first + window.shape[2]] = (window - 0.5 * out).tanh()
            clean = latents[:, :, first : first + self.frames]
            done = self.call(
                model, clean, 0.0, first, cache, text_cache, cache_start=None, updating_cache=True
            )
            made += [out, done]
        return torch.cat(made, 2)


class Krea(WanKin):
    """Full frames of 1560 tokens (fixed in its code); context re-encoded before each block."""

    frame_tokens = 1560

    def load(self, root):
        model = super().load(root)
        from torch.nn.attention import flex_attention as flex

        self.code.flex_attention = lambda *args, kernel_options=None, **more: flex.flex_attention(
            *args, **more
        )
        torch.cuda.current_device = lambda: torch.device("cpu")  # where its time embedding is made
        return model

    def rollout(self, model, cache):
        noise, made, context = noise_of(self.frames * self.chunks, 60, 104), [], None
        for first in range(0, noise.shape[2], self.frames):
            text_cache = self.new_text_cache()
            start = 0 if context is None else context.shape[2]
            if context is not None:
                for layer, fresh in zip(cache, self.new_cache(), strict=True):
                    layer["global_end_index"] = fresh["global_end_index"]
                    layer["local_end_index"] = fresh["local_end_index"]
                model.block_mask = self.code.get_block_mask(
                    "cpu", start, 1560, num_frame_per_block=1, local_attn_size=-1
                )
                self.call(model, context, 0.0, 0, cache, text_cache)
                model.block_mask = None
            chunk = noise[:, :, first : first + self.frames]
            for t in (900.0, 400.0):
                out = self.call(model, chunk, t, start, cache, text_cache)
                chunk = (chunk - 0.5 * out).tanh()
            made.append(out)
            context = chunk
        return torch.cat(made, 2)


class LongLive1(WanKin):
    def load(self, root):
        memory = types.ModuleType("utils.memory")  # asks for the current GPU when imported
        for name in ("gpu", "get_cuda_free_memory_gb", "DynamicSwapInstaller", "log_gpu_memory"):
            setattr(memory, name, None)
        sys.modules["utils.memory"] = memory
        return super().load(root)


class LongLive2(WanKin):
    def load(self, root):
        from transformers.models.x_clip import modeling_x_clip

        modeling_x_clip.x_clip_loss = None  # an unused import of a name that newer versions lack
        os.environ |= {"LLV2_TRITON_ROPE": "0", "LLV2_TRITON_ADALN": "0"}
        return super().load(root)


class LingBot(WanKin):
    dtype = torch.float32  # its time embedding leaves bfloat16 only under CUDA autocast

    def load(self, root):
        model = super().load(root)
        self.code.attention = dense_attention
        return model.float()

    def new_text_cache(self):
        text = torch.zeros(1, TEXT, HEADS, SIZE)
        return [
            {"is_init": torch.zeros(1), "k": text.clone(), "v": text.clone()} for _ in range(LAYERS)
        ]

    def call(self, model, chunk, t, start, cache, text_cache, **more):
        generator = torch.Generator().manual_seed(5)
        context = torch.randn(TEXT, 16, generator=generator).to(self.dtype)
        out = model(
            [chunk[0].to(self.dtype)],
            t=torch.full((1, chunk.shape[2] * self.frame_tokens), t),
            context=[context],
            seq_len=chunk.shape[2] * self.frame_tokens,
            kv_cache=cache,
            crossattn_cache=text_cache,
            current_start=start * self.frame_tokens,
            frame_seqlen=self.frame_tokens,
        )
        return torch.stack(list(out))


WAN = ("wan", "wan.modules")
FAMILIES = {
    "self-forcing": WanKin("wan.modules.causal_model", WAN, 15, dict(model_type="t2v")),
    "self-forcing-window": WanKin(
        "wan.modules.causal_model", WAN, 9, dict(local_attn_size=9, sink_size=3), chunks=6
    ),
    "causal-forcing": WanKin(
        "wan.modules.causal_model", WAN, 4, dict(local_attn_size=4, sink_size=1), frames=1, chunks=8
    ),
    "causvid": CausVid(
        "causvid.models.wan.causal_model",
        ("causvid", "causvid.models", "causvid.models.wan", "causvid.models.wan.wan_base")
        + ("causvid.models.wan.wan_base.modules",),
        15,
        dict(model_type="t2v"),
    ),
    "rolling-forcing": Rolling("wan.modules.causal_model", WAN, 12, {}, chunks=7),
    "longlive-v1": LongLive1(
        "wan.modules.causal_model", WAN, 12, dict(local_attn_size=12, sink_size=3), chunks=7
    ),
    "longlive": LongLive2(
        "wan_5b.modules.causal_model",
        ("wan_5b", "wan_5b.modules"),
        12,
        dict(model_type="t2v", local_attn_size=12, sink_size=3),
        chunks=7,
    ),
    "krea": Krea("wan.modules.causal_model", WAN, 6, {}, chunks=3, integers=True),
    "lingbot": LingBot("wan.modules.model_fast", WAN, 9, {}, name="WanModelFast", chunks=5),
}


def relative(ours, expected):
    return float((ours.float() - expected.float()).norm() / expected.float().norm())


@torch.no_grad()
def run(family, root):
    kind = FAMILIES[family]
    model = kind.load(Path(root).resolve())
    expected = kind.rollout(model, kind.new_cache())
    again = kind.rollout(model, kind.new_cache())
    result = {
        "family": family,
        "spread": float(expected.float().std()),
        "repeatable": torch.equal(expected, again),
        "recipes": {},
    }
    for name in RECIPES:
        with videokv.compress(model, name) as kv, contextlib.redirect_stdout(sys.stderr):
            ours = kind.rollout(model, kind.new_cache())
            memory = kv.memory()
            result["recipes"][name] = {
                "equal": torch.equal(ours, expected),
                "error": relative(ours, expected),
                "encode_calls": kv.encode_calls,
                "bits_per_element": memory.bits_per_element,
                "ratio": memory.ratio,
            }
    result["restored"] = torch.equal(kind.rollout(model, kind.new_cache()), expected)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        outcome = run(*sys.argv[1:])
    print(json.dumps(outcome, indent=1))
