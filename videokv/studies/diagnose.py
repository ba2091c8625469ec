"""What each cache does to attention, teacher-forced along the rollout with the BF16 cache.

One dense rollout a batch of clips (of one on a CPU); every recipe's cache is filled beside it and
examined at chosen layers and denoising steps (2605.26266 §5.3 and App. K to M; 2609.26425 §3 and
Table 5).

    out/results.json      one row a clip, recipe and metric
    out/diagnostics.json  by layer and step; each head's figures; query energy; one attention map
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import videokv
from videokv.devices import resolve_device
from videokv.diagnostics import Diagnosis, Past, cumulative_energy
from videokv.outputs import check_folder
from videokv.studies import attention_example as example
from videokv.studies import rollout as seam
from videokv.studies.demo import batch_name, case_name
from videokv.studies.journal import Journal
from videokv.studies.results import Results, versions, write_json
from videokv.studies.rollouts import OnUnit, _clips, _model, batches_of, is_over, unit_rows
from videokv.studies.side_by_side import SideBySide, Tap
from videokv.studies.variants import REFERENCE, Variant, checked
from videokv.studies.workers import run_units

DEFAULT_STEPS = (0, 3, 7)
BATCH_CLIPS = {"cpu": 1, "cuda": 16}
HEAD_METRICS = ("mass_shift", "jsd_nats", "output_mse")


@dataclass(frozen=True)
class DiagnosePlan:
    """layers None: all. steps: denoising steps that are examined, from 0."""

    variants: tuple[Variant, ...]
    out: Path
    command: str = ""
    clips: int = 8
    chunks: int = 2
    seed: int = 0
    device: str = "auto"
    layers: tuple[int, ...] | None = None
    steps: tuple[int, ...] = DEFAULT_STEPS
    workers: int = 1
    ray: str | None = None

    def __post_init__(self) -> None:
        if self.clips < 1 or not 1 <= self.chunks <= seam.MAX_CHUNKS:
            raise ValueError(
                f"clips must be at least 1 and chunks 1 to {seam.MAX_CHUNKS}, got {self.clips} "
                f"and {self.chunks}"
            )
        if not self.steps or min(self.steps) < 0:
            raise ValueError(f"steps must name denoising steps from 0, got {self.steps}")
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            raise ValueError(f"layers must name layers from 0, got {self.layers}")
        kept = tuple(item for item in checked(self.variants) if item.label != REFERENCE)
        if not kept:
            raise ValueError("diagnose compares packed caches with bf16; name at least one")
        object.__setattr__(self, "variants", kept)


def run_diagnose(
    plan: DiagnosePlan, *, on_unit: OnUnit | None = None, deadline: float | None = None
) -> Results:
    """Run what is not in the folder yet; write ``results.json`` and ``diagnostics.json``.

    deadline: as for ``run_rollouts``; with no clip done there is no ``diagnostics.json``.
    """
    device = resolve_device(plan.device)
    check_folder(plan.out)
    seam.get_clips(plan.clips, seed=plan.seed)
    config = _model(str(device)).config
    layers = tuple(range(config.blocks)) if plan.layers is None else plan.layers
    if max(layers) >= config.blocks or max(plan.steps) >= config.sample_steps:
        raise ValueError(
            f"the model has layers 0..{config.blocks - 1} and steps 0..{config.sample_steps - 1}, "
            f"got {layers} and {plan.steps}"
        )
    size = min(plan.clips, BATCH_CLIPS[device.type])
    fingerprint = {
        "study": "diagnose",
        "clips": plan.clips,
        "chunks": plan.chunks,
        "seed": plan.seed,
        "device": device.type,
        "layers": list(layers),
        "steps": list(plan.steps),
        "variants": [repr(item) for item in plan.variants],
        "model": seam.model_digest(_model(str(device))),
        "videokv": videokv.__version__,
        **({"batch": size} if size > 1 else {}),
    }
    with Journal(plan.out, fingerprint, check=_check_unit) as journal:
        _run_batches(plan, journal, layers, size, str(device), on_unit, deadline)
        names = [case_name(n) for n in range(plan.clips)]
        done = [journal.done[name] for name in names if name in journal.done]
    rows = [row for unit in done for row in unit_rows(unit)]
    results = Results(
        "diagnose", plan.command, plan.seed, str(device), versions(), tuple(rows), protocol="none"
    )
    if done:
        write_json(plan.out / "diagnostics.json", _details(done, layers, plan.steps))
    write_json(plan.out / "results.json", results.as_json())
    return results


def _run_batches(
    plan: DiagnosePlan,
    journal: Journal,
    layers: tuple[int, ...],
    size: int,
    device: str,
    on_unit: OnUnit | None,
    deadline: float | None,
) -> None:
    # A batch of which a clip is missing is run whole: figures depend on who is in a batch.
    batches = {
        batch_name(numbers): numbers
        for numbers in batches_of(plan.clips, size)
        if any(case_name(number) not in journal.done for number in numbers)
    }
    arguments = {
        key: (
            plan.variants, numbers, plan.clips, plan.chunks, plan.seed, layers, plan.steps, device,
        )
        for key, numbers in batches.items()
    }  # fmt: skip
    if is_over(deadline):
        return
    units = run_units(diagnose_unit, arguments, workers=plan.workers, ray=plan.ray)
    with closing(units):
        for key, payloads in units:
            for number, payload in zip(batches[key], payloads, strict=True):
                if case_name(number) not in journal.done:
                    journal.append(case_name(number), payload)
                    if on_unit is not None:
                        on_unit(case_name(number), len(journal.done), plan.clips)
            if is_over(deadline):
                return


def _check_unit(unit: Mapping[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError where a journal's unit is none of this study."""
    unit_rows(unit)
    if not isinstance(unit["taps"], list):
        raise TypeError(f"taps must be a list, got {unit['taps']!r}")


def diagnose_unit(
    variants: tuple[Variant, ...],
    numbers: tuple[int, ...],
    clips: int,
    chunks: int,
    seed: int,
    layers: tuple[int, ...],
    steps: tuple[int, ...],
    device: str,
) -> list[dict[str, Any]]:
    """Some clips in one batch: the journal's payload of each."""
    from videokv.recipes import recipe
    from videokv.worldmodel.sampler import rollout

    model, found = _model(device), _clips(clips, seed)
    window, index = model.config.window_chunks, list(numbers)
    dense = recipe(REFERENCE).new_cache(window_chunks=window)
    packed = {item.label: item.recipe().new_cache(window_chunks=window) for item in variants}
    collected = [
        _Collected(place, example_layer=layers[len(layers) // 2] if number == 0 else None)
        for place, number in enumerate(numbers)
    ]
    cache = SideBySide(
        dense, packed, layers=layers, steps=steps,
        on_attention=lambda tap: _share(tap, collected),
        first_token=seam.CONTEXT_FRAMES * model.config.frame_tokens,
    )  # fmt: skip
    rollout(
        model, found.frames[index, : seam.CONTEXT_FRAMES], found.actions[index], cache,
        chunks=chunks, seed=seed, clips=index, autocast=torch.bfloat16,
    )  # fmt: skip
    sizes = {label: cache.memory().bits_per_element for label, cache in packed.items()}
    return [
        {
            "rows": [
                (case_name(number), label, name, value)
                for label, means in seen.means().items()
                for name, value in (*means, ("bits_per_element", sizes[label]))
            ],
            "taps": seen.taps,
            "energy": seen.energy(),
            "example": seen.example,
        }
        for number, seen in zip(numbers, collected, strict=True)
    ]


class _Collected:
    """Figures of all taps of one clip, the batch's ``place``-th.

    example_layer: whose attention map is kept, None to keep none.
    """

    def __init__(self, place: int, *, example_layer: int | None) -> None:
        self.taps: list[dict[str, Any]] = []
        self.example: dict[str, Any] | None = None
        self._place = place
        self._example_layer = example_layer
        self._moments: dict[int, list[Tensor]] = {}

    def add_query(self, tap: Tap, moments: Tensor) -> None:
        """moments ``[B, Hq, D, D]``; the last chunk's and step's map is kept: most past, least
        noise."""
        self._moments.setdefault(tap.layer, []).append(moments[self._place])
        if tap.layer == self._example_layer:
            self.example = example.attention_map(tap)

    def add(
        self, tap: Tap, label: str, found: Diagnosis, errors: Mapping[str, Sequence[float]]
    ) -> None:
        """What one cache does to this clip; found: of the whole batch."""
        mine = found.of_clip(self._place)
        means = {**mine.means(), **{name: values[self._place] for name, values in errors.items()}}
        heads = {name: getattr(mine, name).double().mean((0, 2)).tolist() for name in HEAD_METRICS}
        self.taps.append(
            {
                "recipe": label, "start_token": tap.start_token, "step": tap.step,
                "layer": tap.layer, "means": means, "heads": heads,
            }
        )  # fmt: skip

    def means(self) -> dict[str, list[tuple[str, float]]]:
        """recipe → (metric, mean over taps). A ratio's mean is that of taps, all alike in size."""
        found: dict[str, dict[str, list[float]]] = {}
        for tap in self.taps:
            for name, value in tap["means"].items():
                found.setdefault(tap["recipe"], {}).setdefault(name, []).append(value)
        return {
            label: [(name, float(np.mean(values))) for name, values in metrics.items()]
            for label, metrics in found.items()
        }

    def energy(self) -> dict[str, list[list[float]]]:
        """layer → cumulative query energy of each head."""
        return {
            str(layer): cumulative_energy(torch.stack(moments).mean(0)).tolist()
            for layer, moments in sorted(self._moments.items())
        }


def _share(tap: Tap, collected: Sequence[_Collected]) -> None:
    """One attention of the batch, given to each clip."""
    query = tap.query.float()
    moments = query.mT @ query / query.shape[2]  # each query head on its own
    for clip in collected:
        clip.add_query(tap, moments)
    for label, found in tap.diagnoses().items():
        errors, here = _reconstruction(tap.pasts[label]), found.cpu()
        for clip in collected:
            clip.add(tap, label, here, errors)


def _reconstruction(past: Past) -> dict[str, list[float]]:
    """Squared error of the held keys and values, absolute and over their mean square, by clip."""
    figures = {}
    for name, exact, held in (
        ("key", past.keys, [s.keys for s in past.held]),
        ("value", past.values, [s.values for s in past.held]),
    ):
        truth = exact.double()
        error = (torch.cat(held, 2).double() - truth).square().mean((1, 2, 3))
        power = truth.square().mean((1, 2, 3))
        figures[f"{name}_mse"] = error.tolist()
        if bool((power > 0).all()):
            figures[f"{name}_mse_relative"] = (error / power).tolist()
    return figures


def _details(
    done: list[Mapping[str, Any]], layers: tuple[int, ...], steps: tuple[int, ...]
) -> dict[str, Any]:
    """Means over clips and chunks by (layer, step), every head's figures, energy, the example."""
    by_place: dict[str, dict[str, dict[tuple[int, int], list[float]]]] = {}
    heads: dict[str, dict[str, list[float]]] = {}
    for unit in done:
        for tap in unit["taps"]:
            place = (tap["layer"], tap["step"])
            for name, value in tap["means"].items():
                cells = by_place.setdefault(tap["recipe"], {}).setdefault(name, {})
                cells.setdefault(place, []).append(value)
            for name, values in tap["heads"].items():
                heads.setdefault(tap["recipe"], {}).setdefault(name, []).extend(values)
    tables = {
        label: {
            name: [[float(np.mean(cells[layer, step])) for step in steps] for layer in layers]
            for name, cells in metrics.items()
            if all((layer, step) in cells for layer in layers for step in steps)
        }
        for label, metrics in by_place.items()
    }
    energy = {
        layer: np.mean([unit["energy"][layer] for unit in done], axis=0).tolist()
        for layer in done[0]["energy"]
    }
    return {
        "layers": list(layers),
        "steps": list(steps),
        "by_layer_and_step": tables,
        "by_head": heads,
        "query_energy": energy,
        "example": done[0]["example"],
    }
