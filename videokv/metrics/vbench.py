"""VBench scores: normalisation, weights, totals with their standard errors (Huang et al., 2024).

    score of a dimension   (x - min) / (max - min)
    quality                weighted mean, dynamic degree 0.5, the others 1
    semantic               mean
    total                  (4 quality + semantic) / 5

Errors are propagated linearly through normalisation and weights, dimensions taken as independent
(as 2605.26266, Table 5 does). Everything here is arithmetic; ``vbench_run.py`` runs the package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

QUALITY: dict[str, tuple[float, float, float]] = {  # dimension → (min, max, weight)
    "subject_consistency": (0.1462, 1.0, 1.0),
    "background_consistency": (0.2615, 1.0, 1.0),
    "temporal_flickering": (0.6293, 1.0, 1.0),
    "motion_smoothness": (0.706, 0.9975, 1.0),
    "dynamic_degree": (0.0, 1.0, 0.5),
    "aesthetic_quality": (0.0, 1.0, 1.0),
    "imaging_quality": (0.0, 1.0, 1.0),
}
SEMANTIC: dict[str, tuple[float, float, float]] = {
    "object_class": (0.0, 1.0, 1.0),
    "multiple_objects": (0.0, 1.0, 1.0),
    "human_action": (0.0, 1.0, 1.0),
    "color": (0.0, 1.0, 1.0),
    "spatial_relationship": (0.0, 1.0, 1.0),
    "scene": (0.0, 0.8222, 1.0),
    "appearance_style": (0.0009, 0.2855, 1.0),
    "temporal_style": (0.0, 0.364, 1.0),
    "overall_consistency": (0.0, 0.364, 1.0),
}
DIMENSIONS = (*QUALITY, *SEMANTIC)
QUALITY_WEIGHT, SEMANTIC_WEIGHT = 4.0, 1.0
# Seconds of the clips that long videos are cut into, by dimension; 2 s where it is not named.
LONG_CLIP_S = {"human_action": 10.0, "temporal_style": 10.0, "overall_consistency": 10.0}
USUAL_CLIP_S = 2.0
WORLD_MODEL_DIMENSIONS = (
    "subject_consistency", "background_consistency", "aesthetic_quality", "imaging_quality",
)  # fmt: skip


@dataclass(frozen=True)
class Score:
    """A mean and its standard error (None where there is one value only)."""

    mean: float
    sem: float | None = None


@dataclass(frozen=True)
class Totals:
    """All between 0 and 1; normalised: each dimension after (x - min) / (max - min)."""

    quality: Score
    semantic: Score
    total: Score
    normalised: Mapping[str, Score]


def clip_seconds(dimension: str) -> float:
    """Length of the pieces that VBench-Long scores in this dimension."""
    if dimension not in DIMENSIONS:
        raise ValueError(f"unknown dimension {dimension!r}; expected one of {DIMENSIONS}")
    return LONG_CLIP_S.get(dimension, USUAL_CLIP_S)


def normalised(dimension: str, raw: Score) -> Score:
    """(x - min) / (max - min) of one dimension."""
    found = {**QUALITY, **SEMANTIC}.get(dimension)
    if found is None:
        raise ValueError(f"unknown dimension {dimension!r}; expected one of {DIMENSIONS}")
    low, high, _ = found
    sem = None if raw.sem is None else raw.sem / (high - low)
    return Score((raw.mean - low) / (high - low), sem)


def totals(raw: Mapping[str, Score]) -> Totals:
    """Quality, semantic and total from the raw score of every dimension.

    Raises ValueError naming the dimensions that are missing or unknown: a total over some of them
    cannot be compared with any other.
    """
    missing = [name for name in DIMENSIONS if name not in raw]
    unknown = [name for name in raw if name not in DIMENSIONS]
    if missing or unknown:
        raise ValueError(
            f"a VBench total needs all {len(DIMENSIONS)} dimensions; missing {missing}, unknown "
            f"{unknown}"
        )
    scores = {name: normalised(name, raw[name]) for name in DIMENSIONS}
    quality = weighted_mean([(scores[n], w) for n, (_, _, w) in QUALITY.items()])
    semantic = weighted_mean([(scores[n], w) for n, (_, _, w) in SEMANTIC.items()])
    return Totals(quality, semantic, total(quality, semantic), scores)


def total(quality: Score, semantic: Score) -> Score:
    """(4 quality + semantic) / 5."""
    return weighted_mean([(quality, QUALITY_WEIGHT), (semantic, SEMANTIC_WEIGHT)])


def weighted_mean(parts: list[tuple[Score, float]]) -> Score:
    """Mean with weights; the standard error of independent parts, None where one has none."""
    weight = sum(w for _, w in parts)
    mean = sum(score.mean * w for score, w in parts) / weight
    squares = 0.0
    for score, w in parts:
        if score.sem is None:
            return Score(mean)
        squares += (score.sem * w) ** 2
    return Score(mean, math.sqrt(squares) / weight)


def from_prompts(values: Mapping[str, list[float]]) -> Score:
    """prompt → scores of its clips: clips are averaged first, the error is taken over prompts.

    Raises ValueError where there is no prompt, or one without a clip (an empty set has no mean).
    """
    empty = [prompt for prompt, clips in values.items() if not clips]
    if not values or empty:
        raise ValueError(
            f"no videos to score: {empty[:3]} have no clip"
            if values
            else "no videos to score: no prompt was matched to a file; check the names"
        )
    means = [sum(clips) / len(clips) for clips in values.values()]
    count = len(means)
    mean = sum(means) / count
    if count < 2:
        return Score(mean)
    spread = sum((m - mean) ** 2 for m in means) / (count - 1)
    return Score(mean, math.sqrt(spread / count))


def consistency(in_clip: Score, between_clips: Score) -> Score:
    """VBench-Long's subject and background consistency: half inside clips, half from clip to clip.

    Both re-standardised (``normalised``) by the caller.
    """
    return weighted_mean([(in_clip, 1.0), (between_clips, 1.0)])
