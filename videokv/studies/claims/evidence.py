"""The runs that the claims are judged by, each made once and kept in the folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from videokv.studies.claims.claim import Untestable
from videokv.studies.diagnose import DiagnosePlan, run_diagnose
from videokv.studies.prefill import PrefillStudy, run_prefill
from videokv.studies.prefill_inputs import load_language_model
from videokv.studies.results import Results, paired_difference
from videokv.studies.rollouts import RolloutPlan, run_rollouts
from videokv.studies.variants import Variant, variant

Say = Callable[[str, int, int], None]

NEITHER, QSAC, PSAC, BOTH = "neither QSAC nor PSAC", "QSAC alone", "PSAC alone", "quantwm-2bit"
KIVI = "kivi-2bit recent 1"
PER_CHANNEL = "rtn-2bit per channel+taylor"
SMALL_CORRECTED, LARGE_PLAIN = "quarot-2bit g128+taylor", "quarot-4bit g64"
WM = "quantwm-2bit"

ROLLED: tuple[Variant, ...] = (
    variant("rtn-4bit"),
    variant("rtn-2bit"),
    variant("rtn-2bit+taylor"),
    variant("rtn-2bit+taylor", PER_CHANNEL, axis="channel"),
    variant("quarot-2bit"),
    variant("quarot-2bit+taylor"),
    variant("quarot-2bit+taylor", SMALL_CORRECTED, group_size=128),
    variant("quarot-4bit", LARGE_PLAIN, group_size=64),
    variant("qvg-2bit"),
    variant("qvg-2bit+taylor"),
    variant("qvg-2bit", "qvg-2bit K2V16", values=None),
    variant("qvg-2bit", "qvg-2bit K16V2", keys=None),
    variant("kivi-2bit"),
    variant("kivi-2bit", KIVI, recent_chunks=1),  # as published: with a recent window in BF16
    variant(WM, NEITHER, candidates=1, metric="none", rank=0),
    variant(WM, QSAC, rank=0),
    variant(WM, PSAC, candidates=1, metric="none"),
    variant(WM),
    variant(WM, "rank 2", rank=2),
    variant(WM, "rank 32", rank=32),
    variant(WM, "16 candidates", candidates=16),
    variant(WM, "full metric", metric="full-candidates"),
)
DIAGNOSED: tuple[Variant, ...] = (
    variant("quarot-4bit"),
    variant("rtn-2bit"),
    variant("quarot-2bit"),
    variant("quarot-2bit+taylor"),
    variant("qvg-2bit"),
    variant(WM, NEITHER, candidates=1, metric="none", rank=0),
    variant(WM, QSAC, rank=0),
    variant(WM, PSAC, candidates=1, metric="none"),
    variant(WM),
)
PREFILLED = ("bf16", "rtn-2bit", "rtn-2bit+taylor")


@dataclass(frozen=True)
class EvidencePlan:
    """quick: 8 shipped clips, 2 chunks, few layers and steps; else 4 chunks and all of them."""

    out: Path
    quick: bool = False
    seed: int = 0
    device: str = "auto"
    workers: int = 1
    ray: str | None = None
    clips: int = 8

    @property
    def chunks(self) -> int:
        return 2 if self.quick else 4

    @property
    def layers(self) -> tuple[int, ...] | None:
        return (0, 2, 4, 6) if self.quick else None

    @property
    def steps(self) -> tuple[int, ...]:
        return (0, 7) if self.quick else (0, 3, 7)

    @property
    def prefill_tokens(self) -> int:
        return 2304 if self.quick else 4608


class Evidence:
    """Runs made when first asked for. say: called with (what, units done, units)."""

    def __init__(self, plan: EvidencePlan, *, say: Say) -> None:
        self.plan = plan
        self._say = say

    @functools.cached_property
    def rollouts(self) -> Results:
        """All of ``ROLLED`` against bf16."""
        plan = self.plan
        return run_rollouts(
            RolloutPlan(
                "claims rollouts", ROLLED, plan.out / "rollouts", _command(plan), plan.clips,
                plan.chunks, plan.seed, plan.device, workers=plan.workers, ray=plan.ray,
            ),
            on_unit=self._say,
        )  # fmt: skip

    @functools.cached_property
    def diagnosis(self) -> Results:
        """All of ``DIAGNOSED``, teacher-forced."""
        plan = self.plan
        return run_diagnose(
            DiagnosePlan(
                DIAGNOSED, plan.out / "diagnosis", _command(plan), plan.clips, plan.chunks,
                plan.seed, plan.device, plan.layers, plan.steps, plan.workers, plan.ray,
            ),
            on_unit=self._say,
        )  # fmt: skip

    @functools.cached_property
    def details(self) -> dict[str, Any]:
        """``diagnostics.json`` of the diagnosis."""
        _ = self.diagnosis
        found: dict[str, Any] = json.loads(
            (self.plan.out / "diagnosis" / "diagnostics.json").read_text()
        )
        return found

    @functools.cached_property
    def prefill(self) -> Results:
        """Chunked prefill of the usual language model; Untestable where it is not here."""
        device = "cpu" if self.plan.device == "auto" else self.plan.device
        study = PrefillStudy(
            recipes=PREFILLED, chunk_tokens=256, tokens=self.plan.prefill_tokens, device=device
        )
        try:
            load_language_model(study.model, device=torch.device(device))
        except (ImportError, ValueError) as error:
            raise Untestable(f"no language model here: {error}") from error
        return run_prefill(
            study, self.plan.out / "prefill", command=_command(self.plan), progress=self._say
        )

    def rolled(self, metric: str, recipe: str, minus: str) -> tuple[float, ...]:
        """``metric`` of one variant minus that of another, clip by clip."""
        return _paired(self.rollouts, metric, recipe, minus)

    def diagnosed(self, metric: str, recipe: str, minus: str | None = None) -> tuple[float, ...]:
        """``metric`` clip by clip, or its paired difference to another variant."""
        if minus is None:
            return _column(self.diagnosis, metric, recipe)
        return _paired(self.diagnosis, metric, recipe, minus)


def _column(results: Results, metric: str, recipe: str) -> tuple[float, ...]:
    found = tuple(r.value for r in results.rows if (r.recipe, r.metric) == (recipe, metric))
    if not found:
        raise ValueError(f"{results.study} has no {metric} of {recipe!r}")
    return found


def _paired(results: Results, metric: str, recipe: str, minus: str) -> tuple[float, ...]:
    found = paired_difference(results.rows, metric=metric, recipe=recipe, reference=minus)
    if not found:
        raise ValueError(f"{results.study} has no {metric} of both {recipe!r} and {minus!r}")
    return found


def _command(plan: EvidencePlan) -> str:
    return "videokv claims" + (" --quick" if plan.quick else "")


def column(results: Results, metric: str, recipe: str) -> Sequence[float]:
    """Values of one recipe and metric in the order of the rows."""
    return _column(results, metric, recipe)
