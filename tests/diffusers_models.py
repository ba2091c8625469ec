"""Tiny random video models of diffusers, and the loops of their pipelines."""

from __future__ import annotations

import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import diffusers
    from diffusers.pipelines.anyflow.pipeline_anyflow_far import AnyFlowFARPipeline
    from diffusers.pipelines.sana_wm.refiner import SanaWMLTX2Refiner


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """Louder queries and keys, so that attention looks at some tokens more than at others."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm_q.weight", "norm_k.weight")):
                parameter.mul_(2.0)
    return model.eval()


def built(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return spread(make())


def anyflow(dtype: torch.dtype = torch.float32, **changes):
    options = {
        "num_layers": 2,
        "num_attention_heads": 3,
        "attention_head_dim": 32,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 64,
        **changes,
    }
    return built(lambda: diffusers.AnyFlowFARTransformer3DModel(**options)).to(dtype)


def anyflow_pipeline(transformer):
    scheduler = diffusers.FlowMapEulerDiscreteScheduler()
    pipeline = AnyFlowFARPipeline(
        tokenizer=None, text_encoder=None, vae=None, transformer=transformer, scheduler=scheduler
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


PARTITION = [1, 2, 1, 2]


def anyflow_video(pipeline, *, partition=PARTITION, batch: int = 1, guidance: float = 1.0):
    """Latents of the pipeline's own loop."""
    dtype = pipeline.transformer.dtype
    text = torch.randn(batch, 5, 16, generator=seeded(1)).to(dtype)
    frames = sum(partition)
    return pipeline(
        prompt_embeds=text,
        negative_prompt_embeds=-text if guidance > 1 else None,
        guidance_scale=guidance,
        latents=torch.randn(batch, 4, frames, 8, 8, generator=seeded()).to(dtype),
        num_frames=4 * (frames - 1) + 1,
        height=64,
        width=64,
        chunk_partition=list(partition),
        num_inference_steps=2,
        output_type="latent",
    ).frames


def sana(dtype: torch.dtype = torch.float32, **changes):
    options = {
        "in_channels": 8,
        "out_channels": 8,
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "cross_attention_dim": 64,
        "num_layers": 2,
        "caption_channels": 16,
        "audio_in_channels": 4,
        "audio_out_channels": 4,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
        "norm_elementwise_affine": True,
        **changes,
    }
    return built(lambda: diffusers.SanaWMLTX2RefinerTransformer3DModel(**options)).to(dtype)


class Refiner(SanaWMLTX2Refiner):
    """The pipeline without its text encoder."""

    def _encode_prompt(self, prompt, *, device, dtype):
        return torch.randn(1, 6, 16, generator=seeded(3)).to(dtype), torch.ones(1, 6)


def sana_pipeline(transformer):
    pipeline = Refiner(
        transformer=transformer,
        connectors=None,
        tokenizer=None,
        text_encoder=None,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sana_video(pipeline, *, frames: int = 14, kept: int = 6):
    """Blocks of 3 frames; a history of ``kept`` - 1 frames, so that a block is cut."""
    latents = torch.randn(1, 8, frames, 4, 4, generator=seeded())
    return pipeline(
        latents, "", fps=16.0, kv_max_frames=kept, output_type="latent", generator=seeded(2)
    )


def skyreels(dtype: torch.dtype = torch.float32, **changes):
    options = {
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 64,
        "num_layers": 2,
        "num_frame_per_block": 2,
        **changes,
    }
    return built(lambda: diffusers.SkyReelsV2Transformer3DModel(**options)).to(dtype)
