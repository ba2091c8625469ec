"""The runs that the claims are judged by, each made once and kept in the folder."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from videokv.devices import resolve_device
from videokv.studies.claims.claim import Untestable
from videokv.studies.diagnose import DiagnosePlan, run_diagnose
from videokv.studies.prefill import PrefillStudy, run_prefill
from videokv.studies.prefill_inputs import default_model_path
from videokv.studies.results import Results, paired_difference, read_results
from videokv.studies.rollouts import RolloutPlan, is_over, run_rollouts
from videokv.studies.variants import Variant, variant
from videokv.studies.workers import one_thread

SHIPPED_CLIPS, FULL_CLIPS = 8, 32
OUT_OF_TIME = "where --seconds ended the run, the same command goes on with it"
Say = Callable[[str, int, int], None]

NEITHER, QSAC, PSAC, BOTH = "neither QSAC nor PSAC", "QSAC alone", "PSAC alone", "quantwm-2bit"
KIVI, KIVI_PACKED = "kivi-2bit", "kivi-2bit recent 0"
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
    variant("kivi-2bit"),  # as published: with a recent window in BF16
    variant("kivi-2bit", KIVI_PACKED, recent_chunks=0),
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
PREFILL_TEXT, PREFILL_CHUNK_TOKENS = "python-reference", 256
PREFILLED = ("bf16", "rtn-2bit", "rtn-2bit+taylor")


@dataclass(frozen=True)
class EvidencePlan:
    """quick: 8 clips, 1 chunk, few layers and steps, short text; else 4 chunks and all of them.

    clips: None takes the 8 that are shipped, and 32 in a full run where ViZDoom can play the
    others. seconds: no clip is begun after them; None: as long as it takes. only: names of the
    claims that are judged, for the command; all without any.
    """

    out: Path
    quick: bool = False
    seed: int = 0
    device: str = "auto"
    workers: int = 1
    ray: str | None = None
    clips: int | None = None
    seconds: float | None = None
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.clips is not None and self.clips < 2:
            raise ValueError(f"clips must be at least 2, for a standard error, got {self.clips}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")

    @property
    def command(self) -> str:
        """What makes the same evidence again, whatever the folder and the machine."""
        some = [f"--only {','.join(self.only)}"] if self.only else []
        given = [] if self.clips is None else [f"--clips {self.clips}"]
        return " ".join(["videokv claims", *some, *self._quick, *given, *self._seed])

    @property
    def _quick(self) -> list[str]:
        return ["--quick"] if self.quick else []

    @property
    def _seed(self) -> list[str]:
        return [f"--seed {self.seed}"] if self.seed else []

    @property
    def clip_count(self) -> int:
        if self.clips is not None:
            return self.clips
        return SHIPPED_CLIPS if self.quick or find_spec("vizdoom") is None else FULL_CLIPS

    @property
    def chunks(self) -> int:
        return 1 if self.quick else 4

    @property
    def layers(self) -> tuple[int, ...] | None:
        return (0, 2, 4, 6) if self.quick else None

    @property
    def steps(self) -> tuple[int, ...]:
        return (0, 7) if self.quick else (0, 3, 7)

    @property
    def size_options(self) -> dict[str, str]:
        """What ``{rolled}``, ``{diagnosed}`` , ``{prefilled}`` and ``{claimed}`` stand for."""
        rolled = f"--clips {self.clip_count} --chunks {self.chunks}"
        some = [] if self.layers is None else [f"--layers {','.join(map(str, self.layers))}"]
        return {
            "rolled": rolled,
            "diagnosed": " ".join([rolled, *some, f"--steps {','.join(map(str, self.steps))}"]),
            "prefilled": f"--text {PREFILL_TEXT} --tokens {self.prefill_tokens}",
            "claimed": " ".join([*self._quick, f"--clips {self.clip_count}", *self._seed]),
        }

    @property
    def prefill_tokens(self) -> int:
        return 1536 if self.quick else 4608


@dataclass(frozen=True)
class Needs:
    """recipes: labels of ``ROLLED`` that are compared; diagnosis, prefill: whether to run them."""

    recipes: frozenset[str] = frozenset(item.label for item in ROLLED)
    diagnosis: bool = True
    prefill: bool = True


class Evidence:
    """Runs made when first asked for. say: called with (what, units done, units).

    needs: what the claims use; the rest is not run. A finished prefill in the folder is checked
    here, before any work: ValueError where its settings are others.

    Attributes:
        deadline: of ``time.monotonic``, from ``plan.seconds`` and the moment of construction.
    """

    def __init__(self, plan: EvidencePlan, *, say: Say, needs: Needs | None = None) -> None:
        self.plan = plan
        self.needs = Needs() if needs is None else needs
        if self.needs.prefill:
            self._finished_prefill()
        self.deadline = None if plan.seconds is None else time.monotonic() + plan.seconds
        self._say = say

    @functools.cached_property
    def rollouts(self) -> Results:
        """All of ``ROLLED`` against bf16, after the shorter runs: a budget that ends early costs
        clips of the rollouts, not whole kinds of evidence."""
        plan = self.plan
        if self.needs.diagnosis:
            _ = self.diagnosis
        if self.needs.prefill:
            with suppress(Untestable):
                _ = self.prefill
        wanted = tuple(item for item in ROLLED if item.label in self.needs.recipes)
        return run_rollouts(
            RolloutPlan(
                "claims rollouts", wanted, plan.out / "rollouts", plan.command, plan.clip_count,
                plan.chunks, plan.seed, plan.device, workers=plan.workers, ray=plan.ray,
            ),
            on_unit=self._say, deadline=self.deadline,
        )  # fmt: skip

    @functools.cached_property
    def diagnosis(self) -> Results:
        """All of ``DIAGNOSED``, teacher-forced."""
        plan = self.plan
        return run_diagnose(
            DiagnosePlan(
                DIAGNOSED, plan.out / "diagnosis", plan.command, plan.clip_count, plan.chunks,
                plan.seed, plan.device, plan.layers, plan.steps, plan.workers, plan.ray,
            ),
            on_unit=self._say, deadline=self.deadline,
        )  # fmt: skip

    @functools.cached_property
    def details(self) -> dict[str, Any]:
        """``diagnostics.json`` of the diagnosis."""
        path = self.plan.out / "diagnosis" / "diagnostics.json"
        if not self.diagnosis.rows:
            raise Untestable(OUT_OF_TIME)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    @functools.cached_property
    def prefill(self) -> Results:
        """Chunked prefill of the usual language model; Untestable where it is not here.

        A finished run in the folder serves too, also where the model is not: it may come from
        another machine.
        """
        finished = self._finished_prefill()
        if finished is not None:
            return finished
        if is_over(self.deadline):
            raise Untestable(OUT_OF_TIME)
        study = PrefillStudy(
            recipes=PREFILLED,
            text=(PREFILL_TEXT,),
            chunk_tokens=PREFILL_CHUNK_TOKENS,
            tokens=self.plan.prefill_tokens,
            device=str(resolve_device(self.plan.device)),
        )
        try:
            default_model_path()
            # Two busy cores make two threads slower than one; many cores do not.
            if self.plan.quick:
                return one_thread(self._run_prefill, study)
            return self._run_prefill(study)
        except Untestable:
            raise
        except (ImportError, ValueError) as error:
            raise Untestable(f"no language model here: {error}") from error

    def _finished_prefill(self) -> Results | None:
        """The prefill in the folder, None where there is none; ValueError naming what is other."""
        path = self.plan.out / "prefill" / "results.json"
        if not path.is_file():
            return None
        found = read_results(path)
        documents = {row.case.partition("/")[0] for row in found.rows}
        read = re.match(r"the first (\d+) tokens of ", found.versions.get("text", ""))
        here = {
            "study": (found.study, "prefill"),
            "chunk": (found.versions.get("chunk_tokens"), str(PREFILL_CHUNK_TOKENS)),
            "tokens": (read and read[1], str(self.plan.prefill_tokens)),
            "text": (", ".join(sorted(documents)), PREFILL_TEXT),
            "recipes": (
                ", ".join(name for name in PREFILLED if name in found.recipes),
                ", ".join(PREFILLED),
            ),
        }
        with suppress(ValueError):  # without the model its name is not known
            here["model"] = (found.versions.get("model"), default_model_path().name)
        for name, (there, wanted) in here.items():
            if there != wanted:
                raise ValueError(
                    f"{path} has {name} = {there or 'none'}, these claims need {wanted}; give "
                    "another --out, or delete that folder and it is run again"
                )
        return found

    def _run_prefill(self, study: PrefillStudy) -> Results:
        return run_prefill(
            study, self.plan.out / "prefill", command=self.plan.command, progress=self._say_in_time
        )

    def _say_in_time(self, key: str, done: int, total: int) -> None:
        if is_over(self.deadline):
            raise Untestable(OUT_OF_TIME)
        self._say(key, done, total)

    def rolled(self, metric: str, recipe: str, minus: str) -> tuple[float, ...]:
        """``metric`` of one variant minus that of another, clip by clip."""
        return _paired(self.rollouts, metric, recipe, minus)

    def diagnosed(self, metric: str, recipe: str, minus: str | None = None) -> tuple[float, ...]:
        """``metric`` clip by clip, or its paired difference to another variant."""
        if minus is None:
            return _column(self.diagnosis, metric, recipe)
        return _paired(self.diagnosis, metric, recipe, minus)

    def prefilled(self, metric: str, recipe: str, minus: str) -> tuple[float, ...]:
        """``metric`` of one recipe minus that of another, chunk by chunk of the text."""
        return _paired(self.prefill, metric, recipe, minus, cases="chunks")


def _column(results: Results, metric: str, recipe: str) -> tuple[float, ...]:
    found = tuple(r.value for r in results.rows if (r.recipe, r.metric) == (recipe, metric))
    if not found:
        raise Untestable(f"{results.study} has no {metric} of {recipe!r} ({OUT_OF_TIME})")
    return found


def _paired(
    results: Results, metric: str, recipe: str, minus: str, *, cases: str = "clips"
) -> tuple[float, ...]:
    found = paired_difference(results.rows, metric=metric, recipe=recipe, reference=minus)
    if len(found) < 2:
        raise Untestable(
            f"{results.study} has {metric} of both {recipe!r} and {minus!r} for {len(found)} "
            f"{cases} ({OUT_OF_TIME})"
        )
    return found
