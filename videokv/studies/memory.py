"""Bytes of a cache and the longest rollout within a budget, for the models people run.

    dense   chunks x chunk_tokens x 2 (K and V) x Hkv x D x 2 bytes x layers x branches
    held    the same at counted bits an element; chunks that a recipe keeps exact, at 16
    peak    held + the current chunk in BF16 + one layer's past decoded (the workspace)

Bits are counted from a chunk that is really packed; a model's shape is that of its sources.
``memory_measured`` sets models that run here beside the formula. Models that keep no cache
(SkyReels-V2, FramePack) are not in the list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import videokv
from videokv.outputs import check_folder
from videokv.studies.journal import Journal
from videokv.studies.results import Results, Row, versions, write_json

BF16_BYTES = 2
SIDES = 2  # keys and values
GIB = 2**30
MAX_BUDGET_GIB = 1e9  # an exbibyte; far beyond it chunks are no longer counted exactly
MEASURED = "measured | "  # before the key of a unit that a model ran for
RESOLUTIONS = {"480p": (480, 832), "720p": (720, 1280)}
DEFAULT_RECIPES = ("bf16", "quarot-2bit", "qvg-2bit", "quantwm-2bit")


@dataclass(frozen=True)
class CacheShape:
    """What a model caches. patch_px: pixels of a token's side; chunk_frames: latent frames that
    are committed together; branches: caches kept at once (guidance)."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    chunk_frames: int
    patch_px: int = 16
    branches: int = 1

    def chunk_tokens(self, resolution: str) -> int:
        """Tokens of a chunk at "480p" (480 x 832) or "720p" (720 x 1280), frames cut to patches."""
        if resolution not in RESOLUTIONS:
            raise ValueError(f"resolution must be one of {tuple(RESOLUTIONS)}, got {resolution!r}")
        height, width = RESOLUTIONS[resolution]
        return self.chunk_frames * (height // self.patch_px) * (width // self.patch_px)

    @property
    def token_bytes(self) -> int:
        """BF16 keys and values of one token, all layers and branches."""
        return SIDES * self.layer_token_bytes * self.layers * self.branches

    @property
    def layer_token_bytes(self) -> int:
        """One side of one layer."""
        return self.kv_heads * self.head_dim * BF16_BYTES


MODELS: tuple[CacheShape, ...] = (
    CacheShape("self-forcing", 30, 12, 128, 3),
    CacheShape("causal-forcing", 30, 12, 128, 3),
    CacheShape("matrix-game-2", 30, 12, 128, 3),
    CacheShape("lingbot-world-v2", 40, 40, 128, 3),
    CacheShape("longlive-2", 30, 24, 128, 8, patch_px=32),
    CacheShape("krea-realtime-14b", 40, 40, 128, 3),
    CacheShape("magi-1-4.5b", 34, 8, 128, 6),
    CacheShape("magi-1-24b", 48, 8, 128, 6),
    CacheShape("hy-worldplay-8b", 54, 16, 128, 4, branches=2),
    CacheShape("longcat-video", 48, 32, 128, 4),
)
MODEL_NAMES = tuple(shape.name for shape in MODELS)


@dataclass(frozen=True)
class Held:
    """Bytes of a cache of some chunks. peak_bytes counts the current chunk and the workspace."""

    dense_bytes: float
    held_bytes: float
    workspace_bytes: float
    peak_bytes: float


def model(name: str) -> CacheShape:
    """A model by name; ValueError lists those there are."""
    for shape in MODELS:
        if shape.name == name:
            return shape
    raise ValueError(f"unknown model {name!r}; expected one of {', '.join(MODEL_NAMES)}")


def held(shape: CacheShape, recipe: str, *, resolution: str, chunks: int) -> Held:
    """The bytes of ``chunks`` committed chunks."""
    return held_tokens(shape, recipe, tokens=shape.chunk_tokens(resolution), chunks=chunks)


def held_tokens(shape: CacheShape, recipe: str, *, tokens: int, chunks: int) -> Held:
    """The bytes of ``chunks`` committed chunks of ``tokens`` each."""
    dense = chunks * tokens * shape.token_bytes
    exact = min(chunks, _exact_chunks(recipe))
    bits = _bits(recipe, tokens, shape.head_dim)
    packed = tokens * shape.token_bytes * (exact + (chunks - exact) * bits / 16)
    workspace = 0 if recipe == "bf16" else SIDES * chunks * tokens * shape.layer_token_bytes
    current = tokens * shape.token_bytes
    return Held(dense, packed, workspace, packed + current + workspace)


def longest(shape: CacheShape, recipe: str, *, resolution: str, budget_bytes: float) -> int:
    """Committed chunks whose peak fits the budget (0: not one)."""
    exact = _exact_chunks(recipe)
    # Beyond the exact chunks every further one costs the same.
    start, after = (
        held(shape, recipe, resolution=resolution, chunks=exact + more).peak_bytes
        for more in (0, 1)
    )
    if budget_bytes >= start:
        return exact + int((budget_bytes - start) // (after - start))
    fitting = [
        count
        for count in range(exact)
        if held(shape, recipe, resolution=resolution, chunks=count).peak_bytes <= budget_bytes
    ]
    return max(fitting, default=0)


def run_memory(
    out: Path,
    *,
    recipes: tuple[str, ...] = DEFAULT_RECIPES,
    models: tuple[str, ...] = MODEL_NAMES,
    budget_gib: float = 24.0,
    frames: int = 24,
    command: str = "",
    measure: bool = False,
) -> Results:
    """Rows for every model, resolution and recipe; case ``<model> <resolution>``.

    frames: latent frames whose bytes are shown, rounded up to chunks. budget_gib: for the cache
    alone, weights and activations not counted. measure: also run the models that are here and set
    the bytes they hold beside the formula's (``memory_measured``). Names given twice count once.
    A folder of this study with the same budget and frames is gone on with.

    Raises ValueError on an unknown model or recipe, on a budget or length that is not positive and
    finite, and on the folder of another study.
    """
    if not 0 < budget_gib <= MAX_BUDGET_GIB or frames < 1:
        raise ValueError(
            f"budget must be above 0 and at most {MAX_BUDGET_GIB:g} GiB and frames positive, got "
            f"{budget_gib} and {frames}"
        )
    shapes = [model(name) for name in dict.fromkeys(models)]
    recipes = tuple(dict.fromkeys(recipes))
    for name in recipes:
        _exact_chunks(name)  # refuses an unknown one before anything is written
    check_folder(out)
    told, missing = versions(), {}
    settings = {
        "study": "memory", "budget_gib": budget_gib, "frames": frames,
        "videokv": videokv.__version__,
    }  # fmt: skip
    with Journal(out, settings, check=_unit_rows) as journal:
        rows: list[Row] = []
        for shape in shapes:
            for recipe in recipes:
                key = f"{shape.name} | {recipe}"
                if key not in journal.done:
                    made = _formula_rows(shape, recipe, budget_gib=budget_gib, frames=frames)
                    journal.append(key, _unit(made))
                rows += _unit_rows(journal.done[key])
        rows.sort(key=_order(shapes, recipes))
        if measure:
            from videokv.studies.memory_measured import measure_memory

            done = {
                key: _unit_rows(unit)
                for key, unit in journal.done.items()
                if key.startswith(MEASURED)
            }
            found = measure_memory(
                recipes,
                done={key.removeprefix(MEASURED): made for key, made in done.items()},
                on_rows=lambda key, made: journal.append(MEASURED + key, _unit(made)),
            )
            rows += found.rows
            missing = found.not_available
            told |= {
                f"measured minus formula, {name}": text for name, text in found.differences.items()
            }
        results = Results("memory", command, 0, "cpu", told, tuple(rows), "none", missing)
        write_json(out / "results.json", results.as_json())
    return results


def _formula_rows(
    shape: CacheShape, recipe: str, *, budget_gib: float, frames: int
) -> tuple[Row, ...]:
    """One model under one recipe, at every resolution."""
    chunks, rows = -(-frames // shape.chunk_frames), []
    for resolution in RESOLUTIONS:
        size = held(shape, recipe, resolution=resolution, chunks=chunks)
        count = longest(shape, recipe, resolution=resolution, budget_bytes=budget_gib * GIB)
        figures = {
            "bits_per_element": _bits(recipe, shape.chunk_tokens(resolution), shape.head_dim),
            "dense_bytes": size.dense_bytes,
            "held_bytes": size.held_bytes,
            "workspace_bytes": size.workspace_bytes,
            "peak_bytes": size.peak_bytes,
            "ratio": size.dense_bytes / size.held_bytes,
            "longest_latent_frames": float(count * shape.chunk_frames),
        }
        case = f"{shape.name} {resolution}"
        rows += [Row(case, recipe, name, float(value)) for name, value in figures.items()]
    return tuple(rows)


def _order(
    shapes: Sequence[CacheShape], recipes: Sequence[str]
) -> Callable[[Row], tuple[int, int]]:
    """Models, then resolutions, then recipes: the order of the tables."""
    cases = [f"{shape.name} {resolution}" for shape in shapes for resolution in RESOLUTIONS]
    return lambda row: (cases.index(row.case), recipes.index(row.recipe))


def _unit(rows: Sequence[Row]) -> dict[str, object]:
    return {"rows": [(row.case, row.recipe, row.metric, row.value) for row in rows]}


def _unit_rows(unit: Mapping[str, Any]) -> list[Row]:
    return [Row(*row) for row in unit["rows"]]


def _exact_chunks(name: str) -> int:
    """Chunks that the recipe keeps dense: its sink and its recent window."""
    from videokv.recipes import recipe

    policy = recipe(name).policy
    return policy.sink_chunks + policy.recent_chunks


@functools.lru_cache(maxsize=256)
def _bits(recipe: str, tokens: int, head_dim: int) -> float:
    from videokv.recipes import bits_per_element

    return float(bits_per_element(recipe, tokens=tokens, head_dim=head_dim))
