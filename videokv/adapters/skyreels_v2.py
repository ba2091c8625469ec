"""SkyReels-V2 of diffusers, given the cache that it does not have.

The model runs its whole window at every denoising step, with a block-causal mask where
``num_frame_per_block`` is above 1. Under that mask the keys and values of a block depend on the
block and what is before it alone. So blocks can come one by one: ``Rollout.denoise`` reads the
cache, ``Rollout.commit`` runs a clean pass that fills it, and ``sample`` is a loop of both.

What is exact: a block of ``num_frame_per_block`` frames on top of earlier blocks equals the same
frames of the whole window, the earlier ones at the timestep they were committed with (diffusion
forcing), to the rounding of attention. What is another computation, and refused: a model without
the mask (``num_frame_per_block`` 1), whose frames all see each other. What is left to the caller:
positions go on counting, so a video longer than the window the model was trained on is beyond what
it saw, whatever the recipe.

    with videokv.compress(transformer, "rtn-4bit+calibrated") as kv:
        latents = skyreels_v2.sample(transformer, noise, prompt, scheduler=scheduler, steps=30)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from videokv.adapters import NewCache
from videokv.adapters.diffusers_models import (
    OurProcessor,
    Processor,
    diffusers_heads,
    find_transformer,
    heads_first,
    heads_last,
    projected_out,
    swap_processors,
    turn_pairs,
)
from videokv.adapters.served import Served
from videokv.cache import KVCache

MODULE = "diffusers.models.transformers.transformer_skyreels_v2"
CLASS = "SkyReelsV2Transformer3DModel"


class SkyReelsV2Adapter:
    """Replaces the self-attention processors; ``Rollout`` and ``sample`` then run the model."""

    name = f"diffusers {CLASS}"

    def matches(self, model: Any) -> bool:
        return find_transformer(model, MODULE, CLASS) is not None

    def served(self, model: Any) -> Served:
        transformer = find_transformer(model, MODULE, CLASS)
        return Served(diffusers_heads(block.attn1 for block in transformer.blocks))

    def install(self, model: Any, new_cache: NewCache) -> Callable[[], None]:
        """One cache a ``Rollout``.

        Raises:
            ValueError: the model has no block-causal mask.
        """
        transformer = find_transformer(model, MODULE, CLASS)
        frames = transformer.config.num_frame_per_block
        if frames < 2:
            raise ValueError(
                "SkyReels-V2 without a block-causal mask (num_frame_per_block 1) lets every frame "
                "see all others, so that no key is final before the end; set the block of an "
                "autoregressive checkpoint with model._set_ar_attention(frames)"
            )
        session = Session(new_cache)
        restore = swap_processors(
            [block.attn1 for block in transformer.blocks],
            lambda own, layer: BlockProcessor(own, layer, session),
        )
        hook = transformer.rope.register_forward_hook(session.shift)

        def undo() -> None:
            hook.remove()
            restore()

        return undo


class Session:
    """What the processors of one context share: the pass that runs."""

    def __init__(self, new_cache: NewCache) -> None:
        self.new_cache = new_cache
        self.cache: KVCache | None = None
        self.first_frame = 0
        self.writing = False

    @contextmanager
    def running(self, cache: KVCache, *, first_frame: int, writing: bool) -> Iterator[None]:
        """Inside, the model attends to this cache, its frames counted from ``first_frame``."""
        self.cache, self.first_frame, self.writing = cache, first_frame, writing
        try:
            yield
        finally:
            self.cache = None

    def shift(self, rope: Any, args: tuple, angles: tuple[Tensor, Tensor]) -> Any:
        """Hook of ``rope``: the angles of the frames at their place in the video."""
        if self.cache is None or not self.first_frame:
            return angles
        latents: Tensor = args[0]
        frames = latents.shape[2] + self.first_frame * rope.patch_size[0]
        if frames // rope.patch_size[0] > rope.max_seq_len:
            raise ValueError(
                f"SkyReels-V2 has positions for {rope.max_seq_len} frames (rope_max_seq_len), this "
                f"block ends at {frames // rope.patch_size[0]}"
            )
        # rope looks at the shape alone
        longer = latents[:, :, :1].expand(-1, -1, frames, -1, -1)
        tokens = angles[0].shape[1]
        cos, sin = rope.forward(longer)
        return cos[:, -tokens:], sin[:, -tokens:]


class BlockProcessor(OurProcessor):
    """Self-attention of one block of frames on the cache."""

    def __init__(self, own: Processor, layer: int, session: Session) -> None:
        super().__init__(own, layer)
        self.session = session

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        cache = self.session.cache
        if cache is None:
            raise ValueError(
                "SkyReels-V2 has no cache of its own, so its pipelines run the whole window and "
                "nothing would be compressed; inside videokv.compress use "
                "videokv.adapters.skyreels_v2.sample or Rollout"
            )
        assert rotary_emb is not None
        rows = _projections(attn, hidden_states)
        cos, sin = rotary_emb[0][..., 0::2], rotary_emb[1][..., 1::2]
        query, key = (_turned(each, cos, sin, attn.heads) for each in rows[:2])
        value = heads_first(rows[2], attn.heads)
        if self.session.writing:
            cache.write(self.layer, cache.length, key, value, query)
        output = cache.attend(self.layer, query, key, value)
        return projected_out(attn, heads_last(output).type_as(query))


class Rollout:
    """One video, block after block, inside ``videokv.compress``.

    model: the transformer, or a pipeline that holds it.

    Raises:
        ValueError: the model is not inside ``videokv.compress``.
    """

    def __init__(self, model: Any) -> None:
        self.model = find_transformer(model, MODULE, CLASS)
        if self.model is None:
            raise ValueError(f"Rollout takes a diffusers {CLASS}, got {type(model).__name__}")
        processor = self.model.blocks[0].attn1.processor
        if not isinstance(processor, BlockProcessor):
            raise ValueError("run Rollout inside videokv.compress(model, recipe)")
        self._session = processor.session
        self.cache = self._session.new_cache(layers=len(self.model.blocks))
        self.block_frames = int(
            self.model.config.num_frame_per_block * self.model.config.patch_size[0]
        )
        self._blocks = 0

    def denoise(self, latents: Tensor, timestep: float, prompt: Tensor, **inputs: Any) -> Tensor:
        """The model's prediction for the next block; the cache is read only.

        latents ``[B, C, block_frames, H, W]``; prompt: text embeddings ``[B, T, C]``; inputs: other
        arguments of the model (``fps``, ``encoder_hidden_states_image``).
        """
        return self._pass(latents, timestep, prompt, inputs, writing=False)

    def commit(
        self, latents: Tensor, prompt: Tensor, *, timestep: float = 0.0, **inputs: Any
    ) -> None:
        """The next block is final: a clean pass writes its keys and values, which are packed.

        timestep: noise level the history is shown at (the model's ``addnoise_condition``).
        """
        self._pass(latents, timestep, prompt, inputs, writing=True)
        patch = self.model.config.patch_size
        tokens = latents[0, 0].numel() // (patch[0] * patch[1] * patch[2])
        self.cache.commit(self.cache.length + tokens)
        self._blocks += 1

    def _pass(
        self,
        latents: Tensor,
        timestep: float,
        prompt: Tensor,
        inputs: dict[str, Any],
        *,
        writing: bool,
    ) -> Tensor:
        if latents.ndim != 5 or latents.shape[2] != self.block_frames:
            raise ValueError(
                f"latents must be one block [B, C, {self.block_frames}, H, W], got "
                f"{tuple(latents.shape)}"
            )
        frames = self.model.config.num_frame_per_block
        times = torch.full((latents.shape[0], frames), timestep, device=latents.device)
        with self._session.running(self.cache, first_frame=self._blocks * frames, writing=writing):
            output: Tensor = self.model(
                hidden_states=latents,
                timestep=times,
                encoder_hidden_states=prompt,
                enable_diffusion_forcing=True,
                return_dict=False,
                **inputs,
            )[0]
        return output


@torch.no_grad()
def sample(
    model: Any,
    noise: Tensor,
    prompt: Tensor,
    *,
    scheduler: Any,
    steps: int,
    negative_prompt: Tensor | None = None,
    guidance_scale: float = 1.0,
    **inputs: Any,
) -> Tensor:
    """Latents ``[B, C, F, H, W]`` from noise of that shape, block by block.

    scheduler: of diffusers; set anew for each block. prompt, negative_prompt: text embeddings
    ``[B, T, C]``; with the second, both run as one batch and share a cache. inputs: other arguments
    of the model.

    Raises:
        ValueError: F is no multiple of a block, or guidance without a negative prompt.
    """
    rollout = Rollout(model)
    if noise.ndim != 5 or noise.shape[2] == 0 or noise.shape[2] % rollout.block_frames:
        raise ValueError(
            f"noise must be [B, C, F, H, W] with F a multiple of {rollout.block_frames}, got "
            f"{tuple(noise.shape)}"
        )
    if guidance_scale != 1.0 and negative_prompt is None:
        raise ValueError(f"guidance_scale {guidance_scale} needs negative_prompt")
    copies = 1 if negative_prompt is None else 2
    text = prompt if negative_prompt is None else torch.cat([negative_prompt, prompt])
    done: list[Tensor] = []
    for block in noise.split(rollout.block_frames, 2):
        scheduler.set_timesteps(steps, device=noise.device)
        for time in scheduler.timesteps:
            batch = block.repeat(copies, 1, 1, 1, 1)
            parts = rollout.denoise(batch, float(time), text, **inputs).chunk(copies)
            guided = parts[0] + guidance_scale * (parts[-1] - parts[0]) if copies > 1 else parts[0]
            block = scheduler.step(guided, time, block, return_dict=False)[0]
        done.append(block)
        if len(done) * rollout.block_frames < noise.shape[2]:  # nothing reads the last one
            rollout.commit(block.repeat(copies, 1, 1, 1, 1), text, **inputs)
    return torch.cat(done, 2)


def _projections(attn: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key, value ``[B, T, H * D]``, the first two normalised."""
    if attn.fused_projections:
        query, key, value = attn.to_qkv(hidden).chunk(3, dim=-1)
    else:
        query, key, value = attn.to_q(hidden), attn.to_k(hidden), attn.to_v(hidden)
    return attn.norm_q(query), attn.norm_k(key), value


def _turned(rows: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """``[B, T, H * D] -> [B, H, T, D]``, turned by RoPE."""
    return turn_pairs(rows.unflatten(2, (heads, -1)), cos, sin).transpose(1, 2)


ADAPTER = SkyReelsV2Adapter()
