"""Run VBench-Long over exported videos, where its package and its weights are here.

Its standard mode is used with a list of prompts cut down to the exported ones: its mode for custom
input scores pieces of 2 s in every dimension, whatever is configured.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from videokv.metrics.unavailable import NotAvailable
from videokv.metrics.vbench import QUALITY, Score, from_prompts
from videokv.metrics.vbench_files import Export, file_stem, read_prompts

PACKAGE = "vbench2_beta_long"
PROMPT_FREE = frozenset(QUALITY)  # dimensions that look at the video alone
CONSISTENCY_WEIGHTS = (0.5, 0.5)  # inside clips, from clip to clip


def score_folder(folder: Path, dimensions: Sequence[str], *, device: str) -> dict[str, Score]:
    """The raw score of each dimension, errors over prompts.

    Raises:
        NotAvailable: VBench or weights of a dimension are not here.
        ValueError: the folder is no export, a dimension has no videos, or a prompt that VBench
            does not know is to be scored for its content.
    """
    exports = read_prompts(folder)
    absent = [d for d in dimensions if not any(entry.dimension == d for entry in exports)]
    if absent:
        raise ValueError(f"{folder} has no videos for {absent[0]}")
    if find_spec("vbench") is None or find_spec(PACKAGE) is None:
        raise NotAvailable("VBench-Long needs the package vbench (with vbench2_beta_long)")
    import vbench2_beta_long

    from videokv.devices import resolve_device

    where = resolve_device(device)
    package = Path(vbench2_beta_long.__file__).parent
    known = json.loads((package / "VBench_full_info.json").read_text())
    found = {}
    for dimension in dimensions:
        chosen = [entry for entry in exports if entry.dimension == dimension]
        with tempfile.TemporaryDirectory() as name:
            out = Path(name)
            (out / "prompts.json").write_text(json.dumps(prompt_list(chosen, known, dimension)))
            runner = vbench2_beta_long.VBenchLong(where, str(out / "prompts.json"), str(out))
            try:
                runner.evaluate(
                    videos_path=str(folder / dimension),
                    name="videokv",
                    dimension_list=[dimension],
                    mode="long_vbench_standard",
                    **options(package, chosen, dimension),
                )
            except (OSError, RuntimeError) as error:
                raise NotAvailable(f"VBench could not score {dimension}: {error}") from error
            answer = json.loads((out / "videokv_eval_results.json").read_text())
        found[dimension] = from_prompts(by_prompt(answer[dimension][1], exports, dimension))
    return found


def prompt_list(
    exports: Sequence[Export], known: Sequence[Mapping[str, Any]], dimension: str
) -> list[dict[str, Any]]:
    """VBench's entries of the exported prompts, with what they say about the content.

    A prompt that is not VBench's, or whose file had to be renamed, gets a bare entry, which does
    for dimensions that look at the video alone; ValueError for the others.
    """
    by_name = {str(entry["prompt_en"]): entry for entry in known}
    entries = []
    for prompt in dict.fromkeys(entry.prompt for entry in exports):
        stem = file_stem(prompt)
        found = by_name.get(prompt)
        if stem == prompt and found is not None and dimension in found["dimension"]:
            entries.append({**found, "dimension": [dimension]})
        elif dimension in PROMPT_FREE:
            entries.append({"prompt_en": stem, "dimension": [dimension]})
        else:
            raise ValueError(
                f"{dimension} compares a video with what VBench knows about its prompt; "
                f"{prompt[:60]!r} is not a prompt of that dimension"
            )
    return entries


def options(package: Path, exports: Sequence[Export], dimension: str) -> dict[str, Any]:
    """What VBench-Long's own command passes on."""
    inside, between = CONSISTENCY_WEIGHTS
    samples = 1 + max(int(Path(entry.file).stem.rpartition("-")[2]) for entry in exports)
    return {
        "static_filter_flag": dimension == "temporal_flickering",
        "use_semantic_splitting": False,
        "clip_length_config": "clip_length_mix.yaml",
        "slow_fast_eval_config": str(package / "configs" / "slow_fast_params.yaml"),
        "num_of_samples_per_prompt": samples,
        "imaging_quality_preprocessing_mode": "longer",
        "sb_clip2clip_feat_extractor": "dino",
        "bg_clip2clip_feat_extractor": "clip",
        "w_inclip": inside,
        "w_clip2clip": between,
        "dev_flag": True,
    }


def by_prompt(
    clips: Sequence[Mapping[str, Any]], exports: Sequence[Export], dimension: str
) -> dict[str, list[float]]:
    """VBench's per-clip list → prompt → scores. Pieces of a video bear its name in their path.

    Raises ValueError where a video was not scored, or as NaN or infinity: a mean over the others
    would be another figure.
    """
    wanted = {
        Path(entry.file).stem: entry.prompt for entry in exports if entry.dimension == dimension
    }
    values: dict[str, list[float]] = {}
    seen = set()
    for clip in clips:
        parts = Path(str(clip["video_path"])).with_suffix("").parts
        names = [stem for stem in wanted if any(p == stem or _piece(p, stem) for p in parts)]
        if not names:
            raise ValueError(f"VBench scored {clip['video_path']}, which no prompt belongs to")
        stem = max(names, key=len)
        seen.add(stem)
        values.setdefault(wanted[stem], []).append(_finite(clip))
    missed = sorted(set(wanted) - seen)
    if missed:
        raise ValueError(f"VBench scored no clip of {missed[:3]} ({len(missed)} videos)")
    return values


def _finite(clip: Mapping[str, Any]) -> float:
    value = float(clip["video_results"])
    if not math.isfinite(value):
        raise ValueError(f"VBench scored {clip['video_path']} as {value}; it has no mean")
    return value


def _piece(part: str, stem: str) -> bool:
    """``<stem>-Scene-001`` or ``<stem>_000``: how pieces of a video are named."""
    return part.startswith((f"{stem}-Scene-", f"{stem}_"))
