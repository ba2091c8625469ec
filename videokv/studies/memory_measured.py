"""The formula of the memory study against models that really run: the shipped world model, and the
usual language model where it is installed.

held_bytes      counted from the storages that are alive after the run
formula_bytes   what ``memory.held`` says of the same shape and chunks
difference_bytes    held - formula; ``difference_of`` says where it comes from
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from videokv.cache.memory import Memory
from videokv.studies import rollout as seam
from videokv.studies.memory import CacheShape, held_tokens
from videokv.studies.prefill_inputs import load_language_model, read_texts, token_ids
from videokv.studies.results import Row

CHUNKS = 3
TEXT_CHUNK_TOKENS = 256
STEPS = 2  # denoising steps: enough to run, bytes do not depend on them


@dataclass(frozen=True)
class Runnable:
    """A model that is here. run: recipe → what its cache held after ``CHUNKS`` chunks."""

    shape: CacheShape
    chunk_tokens: int
    run: Callable[[str], Memory]

    @property
    def case(self) -> str:
        return f"{self.shape.name} measured, {CHUNKS} chunks of {self.chunk_tokens} tokens"


@dataclass(frozen=True)
class MeasuredMemory:
    """differences: case and recipe → in words; not_available: model or recipe → why."""

    rows: tuple[Row, ...]
    differences: dict[str, str]
    not_available: dict[str, str]


def measure_memory(
    recipes: tuple[str, ...],
    *,
    done: Mapping[str, Sequence[Row]] | None = None,
    on_rows: Callable[[str, Sequence[Row]], None] = lambda key, rows: None,
) -> MeasuredMemory:
    """Run every model that is here under every recipe, on the CPU, with a cache in BF16.

    done: rows of an earlier run by key, ``<case> | <recipe>``, which are not run again.
    on_rows: called with the key and the rows of each that was run.
    """
    before = done or {}
    rows: list[Row] = []
    differences: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name, load in (("world model", _world_model), ("language model", _language_model)):
        try:
            found = load()
        except (ImportError, ValueError) as why:
            missing[f"the {name}'s measured row"] = str(why)
            continue
        for recipe in recipes:
            key = f"{found.case} | {recipe}"
            made = list(before.get(key, ()))
            if not made:
                try:
                    memory = found.run(recipe)
                except ValueError as why:
                    missing[f"{recipe} on {found.shape.name}"] = str(why)
                    continue
                figures = compared(found, recipe, memory)
                made = [Row(found.case, recipe, name, value) for name, value in figures.items()]
                on_rows(key, made)
            rows += made
            off = next(row.value for row in made if row.metric == "difference_bytes")
            if off:
                differences[f"{found.shape.name}, {recipe}"] = difference_of(recipe, off)
    return MeasuredMemory(tuple(rows), differences, missing)


def compared(model: Runnable, recipe: str, memory: Memory) -> dict[str, float]:
    """The metrics of one row."""
    size = held_tokens(model.shape, recipe, tokens=model.chunk_tokens, chunks=CHUNKS)
    # Bits are a quotient: times the elements they give whole bytes but for the last digit.
    formula_bytes = float(round(size.held_bytes))
    return {
        "bits_per_element": memory.bits_per_element,
        "dense_bytes": float(memory.dense_bytes),
        "held_bytes": float(memory.held_bytes),
        "formula_bytes": formula_bytes,
        "difference_bytes": memory.held_bytes - formula_bytes,
        "ratio": memory.ratio,
    }


def difference_of(recipe: str, off_bytes: float) -> str:
    """Why a running cache holds other bytes than the formula, which counts warm packed chunks."""
    if off_bytes < 0:
        why = "the first chunk is encoded before queries were seen, without what needs them"
    elif "+" in recipe:
        why = "factors that the correction stores with every chunk"
    else:
        why = "a codebook or basis that the formula takes as shared is not shared yet"
    return f"{off_bytes:+.0f} bytes: {why}"


def _world_model() -> Runnable:
    model = seam.load_model(torch.device("cpu"))
    clips = seam.get_clips(1, seed=0)
    config = model.config
    shape = CacheShape(
        "worldmodel", config.blocks, config.heads, config.head_dim, config.chunk_frames
    )

    def run(name: str) -> Memory:
        from videokv.recipes import recipe
        from videokv.worldmodel.sampler import rollout

        cache = recipe(name).new_cache(window_chunks=config.window_chunks)
        context = clips.frames[:, : seam.CONTEXT_FRAMES]
        made = CHUNKS - seam.CONTEXT_FRAMES // config.chunk_frames
        rollout(
            model, context, clips.actions, cache,
            chunks=made, steps=STEPS, autocast=torch.bfloat16,
        )  # fmt: skip
        return cache.memory()

    return Runnable(shape, config.chunk_tokens, run)


def _language_model() -> Runnable:
    language = load_language_model("default", device=torch.device("cpu"))
    model = language.model.to(torch.bfloat16)  # as on a GPU: the formula's dense rows are BF16
    ids = token_ids(
        language, read_texts(("python-reference",))[0], count=CHUNKS * TEXT_CHUNK_TOKENS
    )
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = CacheShape("smollm2", config.num_hidden_layers, config.num_key_value_heads, head_dim, 1)

    @torch.inference_mode()
    def run(name: str) -> Memory:
        from videokv.adapters.transformers.models import cache_keyword
        from videokv.transformers import CompressedCache

        with CompressedCache(model, name, chunk=TEXT_CHUNK_TOKENS) as cache:
            for part in ids.split(TEXT_CHUNK_TOKENS, 1):
                model(input_ids=part, use_cache=True, **{cache_keyword(model): cache})
            cache.commit()
            return cache.memory()

    return Runnable(shape, TEXT_CHUNK_TOKENS, run)
