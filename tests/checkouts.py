"""Runs a real checkout of a video model on the CPU, tiny and with random weights, without and with
``videokv.compress``, and prints what came out as JSON.

    python tests/checkouts.py FAMILY PATH

Each family in a process of its own: the repositories use the same top-level names.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
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
CHECKED = "rtn-8bit"


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
            **({"frame_seqlen": self.frame_tokens} if self.code.__name__.endswith("fast") else {}),
        )
        return torch.stack(list(out))


class LongLiveRelative(LongLive2):
    """Keys cached before rotary embedding."""

    def tiny(self, cls):
        model = super().tiny(cls)
        model.use_relative_rope = True
        return model


class MatrixGame(WanKin):
    def load(self, root):
        stub = types.ModuleType("flash_attn")
        stub.flash_attn_func = dense_attention
        stub.flash_attn_varlen_func = None
        stub.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
        sys.modules["flash_attn"] = stub
        return super().load(root)

    def tiny(self, cls):
        sizes = dict(dim=HEADS * SIZE, ffn_dim=64, freq_dim=32, in_dim=8, out_dim=4)
        model = cls(num_heads=HEADS, num_layers=LAYERS, **sizes, **self.options)
        self.code.attention = dense_attention
        return random_weights(model)

    def call(self, model, chunk, t, start, cache, text_cache, **more):
        generator = torch.Generator().manual_seed(5)
        seen = torch.randn(1, 6, 1280, generator=generator).bfloat16()
        return model(
            chunk,
            t=torch.full((1, chunk.shape[2]), t),
            visual_context=seen,
            cond_concat=0.5 * chunk,
            kv_cache=cache,
            kv_cache_mouse=[None] * LAYERS,
            kv_cache_keyboard=[None] * LAYERS,
            crossattn_cache=text_cache,
            current_start=start * self.frame_tokens,
        )


class LongCat:
    """Re-encodes its last clean frames for each segment, then denoises with guidance."""

    def load(self, root):
        sys.path.insert(0, str(root))
        hollow_packages(root, "longcat_video", "longcat_video.modules")
        code = importlib.import_module("longcat_video.modules.longcat_video_dit")
        code.Attention._process_attn = lambda self, q, k, v, shape: (
            functional.scaled_dot_product_attention(q, k, v, scale=self.scale)
        )
        code.MultiHeadCrossAttention._process_cross_attn = self.cross
        model = code.LongCatVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            hidden_size=HEADS * SIZE,
            depth=LAYERS,
            num_heads=HEADS,
            caption_channels=16,
            adaln_tembed_dim=32,
            frequency_embedding_size=32,
            cp_split_hw=[1, 1],
        )
        return random_weights(model).float()

    @staticmethod
    def cross(self, x, cond, lengths):
        batch = x.shape[0]
        q = self.q_norm(self.q_linear(x).unflatten(-1, (self.num_heads, -1)))
        k, v = self.kv_linear(cond).view(batch, -1, 2, self.num_heads, self.head_dim).unbind(2)
        return self.proj(dense_attention(q, self.k_norm(k), v).flatten(2))

    def new_cache(self):
        return None

    def rollout(self, model, cache):
        text = torch.randn(2, 1, TEXT, 16, generator=torch.Generator().manual_seed(5))
        clean, made = noise_of(9)[:, :, :5].float(), []
        for segment in range(3):
            _, kept = model(
                clean,
                torch.zeros(1, 5),
                text[:1] * 0,
                return_kv=True,
                skip_crs_attn=True,
            )
            x = noise_of(9)[:, :, 5 - segment : 9 - segment].float()
            for t in (900.0, 500.0):
                out = model(
                    torch.cat([x, x]),
                    torch.full((2, 4), t),
                    text,
                    num_cond_latents=5,
                    kv_cache_dict=kept,
                )
                x = (x - 0.7 * out[:1] + 0.2 * out[1:]).tanh()
            made.append(x)
            clean = torch.cat([clean, x], 2)[:, :, -5:]
        return torch.cat(made, 2)


class WorldPlay:
    """Two guidance branches; all frames so far are retrieved for each chunk."""

    def load(self, root):
        sys.path.insert(0, str(root))
        package = "hyvideo.models.transformers"
        hollow_packages(root, "hyvideo", "hyvideo.models", package)
        state = importlib.import_module("hyvideo.commons.infer_state")
        state.initialize_infer_state(
            types.SimpleNamespace(
                sage_blocks_range="0-1",
                use_sageattn=False,
                enable_torch_compile=False,
                use_fp8_gemm=False,
                quant_type="fp8-per-block",
                include_patterns="double_blocks",
                use_vae_parallel=False,
            )
        )
        code = importlib.import_module(f"{package}.worldplay_1_5_transformer")
        attention = importlib.import_module(f"{package}.modules.attention")
        alone = types.SimpleNamespace(sp_enabled=False, sp=1)
        code.get_parallel_state = attention.get_parallel_state = lambda: alone
        model = code.HunyuanVideo_1_5_DiffusionTransformer(
            in_channels=4,
            concat_condition=False,
            out_channels=4,
            hidden_size=HEADS * SIZE,
            heads_num=HEADS,
            mlp_width_ratio=2.0,
            mm_double_blocks_depth=LAYERS,
            mm_single_blocks_depth=0,
            rope_dim_list=[8, 12, 12],
            text_states_dim=16,
            attn_mode="torch",
        )
        model.add_action_parameters()
        return random_weights(model)

    def new_cache(self):
        generator = torch.Generator().manual_seed(5)
        pair = torch.randn(2, LAYERS, 2, 1, HEADS, TEXT, SIZE, generator=generator).bfloat16()
        return [
            [{"k_txt": k, "v_txt": v, "k_vision": None, "v_vision": None} for k, v in branch]
            for branch in pair
        ]

    def call(self, model, x, t, cache, start, total, **more):
        frames = x.shape[2]
        shift = torch.arange(start, start + frames) * 0.1
        views = torch.eye(4).repeat(1, frames, 1, 1)
        views[0, :, 0, 3] = shift
        return model.forward_vision(
            x,
            torch.full((frames,), t),
            action=torch.zeros(1, frames),
            viewmats=views.bfloat16(),
            Ks=torch.eye(3).repeat(1, frames, 1, 1).bfloat16(),
            kv_cache=cache,
            rope_temporal_size=total,
            start_rope_start_idx=start,
            **more,
        )

    def rollout(self, model, caches):
        noise, made, past = noise_of(12), [], None
        for first in range(0, 12, 4):
            if past is not None:
                caches = [
                    self.call(model, past, 14.0, c, 0, first, cache_vision=True) for c in caches
                ]
            x = noise[:, :, first : first + 4]
            for t in (900.0, 500.0):
                good, bad = (self.call(model, x, t, c, first, first + 4)[0] for c in caches)
                x = (x - 0.7 * good + 0.2 * bad).tanh()
            made.append(x)
            past = torch.cat(made, 2)
        return past


class WorldPlayWan:
    """The history is re-encoded for each chunk; sageattention and its GPU are stood in for."""

    def load(self, root):
        sys.path[:0] = [str(root), str(Path(root, "wan"))]
        hollow_packages(root, "hyvideo")
        sage = types.ModuleType("sageattention")
        sage.sageattn = lambda q, k, v, tensor_layout="HND", is_causal=False: (
            functional.scaled_dot_product_attention(q, k, v)
        )
        torch._dynamo.config.disable = True  # its blocks are compiled: minutes on a CPU
        importlib.import_module("diffusers.models.attention")  # looks for the real package
        sys.modules["sageattention"] = sage
        for name, parts in {
            "distributed": (),
            "distributed.communication_op": (
                "all_to_all_sp",
                "sequence_model_parallel_all_gather",
            ),
            "distributed.parallel_state": ("get_sp_parallel_rank", "get_sp_world_size"),
        }.items():
            sys.modules[name] = types.ModuleType(name)
            for part in parts:
                setattr(sys.modules[name], part, None)
        hollow_packages(root, "wan", "wan.models", "wan.models.dits")
        code = importlib.import_module("wan.models.dits.arwan_w_action_w_mem_relative_rope")
        model = code.WanTransformer3DModel(
            num_attention_heads=HEADS,
            attention_head_dim=SIZE,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=32,
            ffn_dim=64,
            num_layers=LAYERS,
        )
        model.add_discrete_action_parameters()
        return random_weights(model).float()

    def new_cache(self):
        return [{"k": None, "v": None} for _ in range(LAYERS)]

    def call(self, model, x, t, cache, start, **more):
        frames = x.shape[2]
        views = torch.eye(4).repeat(1, frames, 1, 1)
        views[0, :, 0, 3] = 0.1 * torch.arange(start, start + frames)
        text = torch.randn(1, TEXT, 16, generator=torch.Generator().manual_seed(5))
        return model(
            hidden_states=x.float(),
            timestep=torch.full((frames,), t),
            encoder_hidden_states=text,
            return_dict=False,
            current_start=start * HEIGHT * WIDTH // 4,
            current_end=(start + frames) * HEIGHT * WIDTH // 4,
            kv_cache=cache,
            window_frames=12,
            viewmats=views,
            Ks=torch.eye(3).repeat(1, frames, 1, 1),
            action=torch.zeros(1, frames),
            **more,
        )

    def rollout(self, model, cache):
        noise, made, past = noise_of(12), [], None
        for first in range(0, 12, 4):
            if past is not None:
                cache = self.call(model, past, 14.0, cache, 0, is_cache=True)
            x = noise[:, :, first : first + 4].float()
            for t in (900.0, 500.0):
                x = (x - 0.5 * self.call(model, x, t, cache, first)[0]).tanh()
            made.append(x)
            past = torch.cat(made, 2)
        return past


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
    "longlive-relative": LongLiveRelative(
        "wan_5b.modules.causal_model",
        ("wan_5b", "wan_5b.modules"),
        12,
        dict(model_type="t2v", local_attn_size=12, sink_size=3),
        chunks=7,
    ),
    "matrix-game": MatrixGame(
        "wan.modules.causal_model", WAN, 6, dict(model_type="i2v", local_attn_size=6), chunks=6
    ),
    "longcat": LongCat(),
    "hy-worldplay": WorldPlay(),
    "hy-worldplay-wan": WorldPlayWan(),
    "krea": Krea("wan.modules.causal_model", WAN, 6, {}, chunks=3, integers=True),
    "lingbot": LingBot(
        "wan.modules.model_fast",
        WAN,
        9,
        dict(local_attn_size=9, sink_size=3),
        name="WanModelFast",
        chunks=6,
    ),
    "lingbot-causal": LingBot(
        "wan.modules.model_causal",
        WAN,
        9,
        dict(local_attn_size=9, sink_size=3),
        name="WanModelFast",
        chunks=6,
    ),
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
        with (
            videokv.compress(model, name, record_dense=name == CHECKED) as kv,
            contextlib.redirect_stdout(sys.stderr),
        ):
            ours = kind.rollout(model, kind.new_cache())
            memory = kv.memory()
            result["recipes"][name] = {
                "equal": torch.equal(ours, expected),
                "error": relative(ours, expected),
                "encode_calls": kv.encode_calls,
                "bits_per_element": memory.bits_per_element,
                "ratio": memory.ratio,
            }
            if name == CHECKED:
                checks = kv.verify()
                result["checked_layers"] = sorted({check.layer for check in checks})
                result["largest_error"] = max(check.error for check in checks)
    result["restored"] = torch.equal(kind.rollout(model, kind.new_cache()), expected)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        outcome = run(*sys.argv[1:])
    print(json.dumps(outcome, indent=1))
