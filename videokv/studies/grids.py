"""Which variants each study of rollouts runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from videokv.studies.results import Results, Row
from videokv.studies.variants import REFERENCE, Variant, variant

SPLITS = ("K2V16", "K16V2", "K2V2")
CORRECTION_KINDS = ("taylor", "cumulant", "exact", "measured", "calibrated")
TRADEOFF_GROUPS = (32, 64, 128)
TRADEOFF_BITS = (2, 3, 4)


def compare_variants(recipes: Sequence[str]) -> tuple[Variant, ...]:
    """Recipes as they are."""
    return tuple(variant(name) for name in recipes)


def kvsplit_variants(recipes: Sequence[str]) -> tuple[Variant, ...]:
    """Keys alone, values alone, both (2609.26425, Table 2). Recipes at 2 bits, no correction
    where keys are exact."""
    found = []
    for name in recipes:
        bare = name.partition("+")[0]
        found.append(variant(name, f"{name} K2V16", values=None))
        found.append(variant(bare, f"{bare} K16V2", keys=None))
        found.append(variant(name, f"{name} K2V2"))
    return tuple(dict.fromkeys(found))


def tradeoff_variants(
    family: str,
    *,
    bits: Sequence[int] = TRADEOFF_BITS,
    groups: Sequence[int] = TRADEOFF_GROUPS,
    correction: str = "taylor",
) -> tuple[Variant, ...]:
    """Bits × group sizes, with and without a correction (2605.26266, Fig. 5)."""
    return tuple(
        variant(f"{family}-{width}bit{ending}", f"{family}-{width}bit g{size}{ending}",
                group_size=size)
        for width in bits
        for size in groups
        for ending in ("", f"+{correction}")
    )  # fmt: skip


def ablation_parts() -> dict[str, tuple[Variant, ...]]:
    """Part → variants: one thing changed at a time (2609.26425, Tables 6 and 9 to 11)."""
    wm = "quantwm-2bit"
    return {
        "qsac-psac": (
            variant(wm, "neither QSAC nor PSAC", candidates=1, metric="none", rank=0),
            variant(wm, "QSAC alone", rank=0),
            variant(wm, "PSAC alone", candidates=1, metric="none"),
            variant(wm, "QSAC and PSAC"),
        ),
        "rank": tuple(variant(wm, f"rank {r}", rank=r) for r in (2, 4, 8, 16, 32)),
        "candidates": tuple(
            variant(wm, f"{m} candidates", candidates=m) for m in (1, 2, 4, 8, 16)
        ),
        "metric": (
            variant(wm, "diagonal metric", metric="diagonal"),
            variant(wm, "full metric", metric="full-candidates"),  # as published
            variant(wm, "full score", metric="full"),
        ),
        "centroids": tuple(
            variant(wm, f"{k} centroids", centroids=k) for k in (8, 16, 32, 64)
        ),
        "correction": (
            variant("quarot-2bit"),
            *(variant(f"quarot-2bit+{kind}") for kind in CORRECTION_KINDS),
        ),
        "policy": tuple(
            variant("quarot-2bit", f"quarot-2bit sink {sink} recent {recent}",
                    sink_chunks=sink, recent_chunks=recent)
            for sink, recent in ((0, 0), (1, 0), (0, 1), (1, 1))
        ),
    }  # fmt: skip


def ablate_variants(parts: Iterable[str]) -> tuple[Variant, ...]:
    """The variants of some parts; ValueError names the parts there are."""
    known = ablation_parts()
    found: list[Variant] = []
    for part in parts:
        if part not in known:
            raise ValueError(f"unknown part {part!r}; expected some of {', '.join(known)}")
        found += known[part]
    return tuple(found)


def pareto_rows(results: Results, *, metric: str = "psnr_db") -> list[Row]:
    """``on_pareto_front``: 1 where no other recipe has as few bits and a higher mean metric."""
    points: dict[str, tuple[float, float]] = {}
    for name in results.recipes:
        size, found = results.find(name, "bits_per_element"), results.find(name, metric)
        if name != REFERENCE and size is not None and found is not None:
            points[name] = (size.mean, found.mean)
    rows = []
    for name, (bits, quality) in points.items():
        beaten = any(
            b <= bits and q >= quality and (b, q) != (bits, quality) for b, q in points.values()
        )
        rows.append(Row("all clips", name, "on_pareto_front", float(not beaten)))
    return rows
