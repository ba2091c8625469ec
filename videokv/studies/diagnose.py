"""What each cache does to attention, teacher-forced along the rollout with the BF16 cache.

One dense rollout a clip; every recipe's cache is filled beside it and examined at chosen layers and
denoising steps (2605.26266 §5.3 and App. K to M; 2609.26425 §3 and Table 5).

    out/results.json      one row a clip, recipe and metric
    out/diagnostics.json  by layer and step; each head's figures; query energy; one attention map
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import videokv
from videokv.devices import resolve_device
from videokv.diagnostics import cumulative_energy
from videokv.outputs import check_folder
from videokv.studies import attention_example as example
from videokv.studies import rollout as seam
from videokv.studies.demo import case_name
from videokv.studies.journal import Journal
from videokv.studies.results import Results, versions, write_json
from videokv.studies.rollouts import OnUnit, _clips, _model, unit_rows
from videokv.studies.side_by_side import SideBySide, Tap
from videokv.studies.variants import REFERENCE, Variant, checked
from videokv.studies.workers import run_units

DEFAULT_STEPS = (0, 3, 7)
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


def run_diagnose(plan: DiagnosePlan, *, on_unit: OnUnit | None = None) -> Results:
    """Run what is not in the folder yet; write ``results.json`` and ``diagnostics.json``."""
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
    }
    with Journal(plan.out, fingerprint, check=_check_unit) as journal:
        arguments = {
            case_name(n): (
                plan.variants, n, plan.clips, plan.chunks, plan.seed, layers, plan.steps,
                str(device),
            )
            for n in range(plan.clips)
            if case_name(n) not in journal.done
        }  # fmt: skip
        units = run_units(diagnose_unit, arguments, workers=plan.workers, ray=plan.ray)
        for key, payload in units:
            journal.append(key, payload)
            if on_unit is not None:
                on_unit(key, len(journal.done), plan.clips)
        done = [journal.done[case_name(n)] for n in range(plan.clips)]
    rows = [row for unit in done for row in unit_rows(unit)]
    results = Results(
        "diagnose", plan.command, plan.seed, str(device), versions(), tuple(rows), protocol="none"
    )
    write_json(plan.out / "diagnostics.json", _details(done, layers, plan.steps))
    write_json(plan.out / "results.json", results.as_json())
    return results


def _check_unit(unit: Mapping[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError where a journal's unit is none of this study."""
    unit_rows(unit)
    if not isinstance(unit["taps"], list):
        raise TypeError(f"taps must be a list, got {unit['taps']!r}")


def diagnose_unit(
    variants: tuple[Variant, ...],
    number: int,
    clips: int,
    chunks: int,
    seed: int,
    layers: tuple[int, ...],
    steps: tuple[int, ...],
    device: str,
) -> dict[str, Any]:
    """One clip: the journal's payload."""
    from videokv.recipes import recipe
    from videokv.worldmodel.sampler import rollout

    model, found = _model(device), _clips(clips, seed)
    window = model.config.window_chunks
    dense = recipe(REFERENCE).new_cache(window_chunks=window)
    packed = {item.label: item.recipe().new_cache(window_chunks=window) for item in variants}
    seen = _Collected(example_layer=layers[len(layers) // 2], wants_example=number == 0)
    cache = SideBySide(
        dense, packed, layers=layers, steps=steps, on_attention=seen.add,
        first_token=seam.CONTEXT_FRAMES * model.config.frame_tokens,
    )  # fmt: skip
    rollout(
        model, found.frames[[number], : seam.CONTEXT_FRAMES], found.actions[[number]], cache,
        chunks=chunks, seed=seed, clips=[number], autocast=torch.bfloat16,
    )  # fmt: skip
    case = case_name(number)
    return {
        "rows": [(case, label, name, v) for label, m in seen.means().items() for name, v in m],
        "taps": seen.taps,
        "energy": seen.energy(),
        "example": seen.example,
    }


class _Collected:
    """Figures of all taps of one rollout."""

    def __init__(self, *, example_layer: int, wants_example: bool) -> None:
        self.taps: list[dict[str, Any]] = []
        self.example: dict[str, Any] | None = None
        self._example_layer = example_layer if wants_example else None
        self._moments: dict[int, list[Tensor]] = {}

    def add(self, tap: Tap) -> None:
        pooled = tap.query.float().flatten(0, 1)  # [B Hq, M, D]: each query head on its own
        self._moments.setdefault(tap.layer, []).append(pooled.mT @ pooled / pooled.shape[1])
        for label, found in tap.diagnoses().items():
            past = tap.pasts[label]
            means = {**found.means(), **_reconstruction(past)}
            heads = {
                name: getattr(found, name).double().mean((0, 2)).tolist() for name in HEAD_METRICS
            }
            self.taps.append(
                {
                    "recipe": label, "start_token": tap.start_token, "step": tap.step,
                    "layer": tap.layer, "means": means, "heads": heads,
                }
            )  # fmt: skip
        if tap.layer == self._example_layer:  # the last chunk and step win: most past, least noise
            self.example = example.attention_map(tap)

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


def _reconstruction(past: Any) -> dict[str, float]:
    """Squared error of the held keys and values, absolute and over their mean square."""
    figures = {}
    for name, exact, held in (
        ("key", past.keys, [s.keys for s in past.held]),
        ("value", past.values, [s.values for s in past.held]),
    ):
        truth = exact.double()
        error = float((torch.cat(held, 2).double() - truth).square().mean())
        figures[f"{name}_mse"] = error
        power = float(truth.square().mean())
        if power > 0:
            figures[f"{name}_mse_relative"] = error / power
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
