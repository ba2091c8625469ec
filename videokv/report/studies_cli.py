"""The commands of the studies: options → plan → table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from videokv.command_line import command
from videokv.report.run_options import AsJson, Out, RunOptions, with_run_options
from videokv.report.study_columns import is_of_one_chunk
from videokv.studies.results import Results
from videokv.studies.rollouts import OnUnit
from videokv.studies.variants import Variant

PLAIN_WIDTH = 140
LONG_CHUNKS = 60
HIDDEN = ("held_bytes", "dense_bytes", "psnr_pooled_db", "sharpness", "identical_frames")

Window = Annotated[int | None, typer.Option(help="Chunks the cache keeps. Default: the model's.")]
Recipes = Annotated[str, typer.Option(help="Recipes with commas between; see: videokv recipes.")]

COMPARED = "rtn-2bit,quarot-2bit,quarot-2bit+taylor,quarot-2bit+calibrated,qvg-2bit,quantwm-2bit"
DIAGNOSED = (
    "rtn-2bit,rtn-2bit+taylor,quarot-2bit,quarot-2bit+taylor,quarot-2bit+calibrated,qvg-2bit,"
    "quantwm-2bit"
)


@with_run_options(out="videokv-compare", chunks=4)
def compare(
    recipes: Recipes = COMPARED,
    window: Window = None,
    also: Annotated[
        str | None, typer.Option(help="More metrics: lpips_alex, lpips_vgg, flip.")
    ] = None,
    *,
    run: RunOptions,
) -> None:
    """Any recipes on the shipped world model, each against the rollout with the BF16 cache."""
    from videokv.studies.grids import compare_variants

    more = () if also is None else split(also)
    results = _rolled("compare", compare_variants(split(recipes)), run, window=window, also=more)
    show(results, run.out, as_json=run.as_json)


@with_run_options(out="videokv-kvsplit", chunks=4)
def kvsplit(recipes: Recipes = "qvg-2bit,rtn-2bit,quarot-2bit", *, run: RunOptions) -> None:
    """Keys alone at 2 bits (K2V16), values alone (K16V2), both (K2V2)."""
    from videokv.studies.grids import kvsplit_variants

    results = _rolled("kvsplit", kvsplit_variants(split(recipes)), run)
    show(results, run.out, as_json=run.as_json)


@with_run_options(out="videokv-tradeoff", chunks=4)
def tradeoff(
    family: Annotated[str, typer.Option(help="Quantizer, with 2, 3 and 4 bits.")] = "quarot",
    bits: Annotated[str, typer.Option(help="Widths, with commas.")] = "2,3,4",
    groups: Annotated[str, typer.Option(help="Group sizes, with commas.")] = "32,64,128",
    correction: Annotated[str, typer.Option(help="With it and without it.")] = "taylor",
    *,
    run: RunOptions,
) -> None:
    """Bits against quality over widths and group sizes, with and without a correction.

    on_pareto_front is 1 where no other recipe is as small and better in psnr_db.
    """
    from videokv.studies.grids import pareto_rows, tradeoff_variants
    from videokv.studies.rollouts import with_rows

    variants = tradeoff_variants(
        family, bits=integers(bits, "bits"), groups=integers(groups, "groups"),
        correction=correction,
    )  # fmt: skip
    results = _rolled("tradeoff", variants, run)
    results = with_rows(results, pareto_rows(results), run.out)
    show(results, run.out, as_json=run.as_json)


@with_run_options(out="videokv-ablate", chunks=4)
def ablate(
    parts: Annotated[
        str,
        typer.Option(
            help="Any of qsac-psac, rank, candidates, metric, centroids, correction, policy."
        ),
    ] = "qsac-psac,rank,candidates,metric,centroids,correction,policy",
    *,
    run: RunOptions,
) -> None:
    """QuantWM's parts, ranks, candidates and centroids; kinds of correction; sink and recent."""
    from videokv.studies.grids import ablate_variants

    results = _rolled("ablate", ablate_variants(split(parts)), run)
    show(results, run.out, as_json=run.as_json)


@with_run_options(out="videokv-longrun", chunks=LONG_CHUNKS, chunks_option=False)
def longrun(
    recipes: Recipes = "rtn-2bit,quarot-2bit,quarot-2bit+calibrated,quantwm-2bit",
    window: Window = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            help="Chunks of 3 frames, up to 10,000; 35 frames are 3 s. Default: 60, 15.4 s."
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Length instead of --chunks: 60 is 234 chunks.")
    ] = None,
    *,
    run: RunOptions,
) -> None:
    """A minute and more: close to BF16 early, sharp, colourful and moving late.

    PSNR and flicker of every chunk are to BF16; sharpness, saturation, motion and drift of pixel
    values are compared with real frames, since rollouts part after a while whatever the cache.
    After 10 chunks the clip's actions begin again. The cache keeps the model's window of 8 chunks.
    """
    from videokv.studies.grids import compare_variants
    from videokv.studies.rollout import chunks_for

    if chunks is not None and seconds is not None:
        raise ValueError("--chunks and --seconds both say how long; give one of them")
    if seconds is not None:
        chunks = chunks_for(seconds)
    run = replace(run, chunks=LONG_CHUNKS if chunks is None else chunks)
    variants = compare_variants(split(recipes))
    results = _rolled("longrun", variants, run, window=window, long=True)
    show(results, run.out, as_json=run.as_json)


@with_run_options(out="videokv-diagnose", chunks=2)
def diagnose(
    recipes: Recipes = DIAGNOSED,
    layers: Annotated[str | None, typer.Option(help="Layers from 0, with commas; all.")] = None,
    steps: Annotated[str, typer.Option(help="Denoising steps from 0, with commas.")] = "0,3,7",
    *,
    run: RunOptions,
) -> None:
    """What caches do to attention with the same queries: mass, divergence, outputs, tokens."""
    from videokv.studies.diagnose import DiagnosePlan, run_diagnose
    from videokv.studies.variants import variant

    plan = DiagnosePlan(
        tuple(variant(name) for name in split(recipes)), run.out, command(), run.clips, run.chunks,
        run.seed, run.device, None if layers is None else integers(layers, "layers"),
        integers(steps, "steps"), run.workers, run.ray,
    )  # fmt: skip
    with progress() as on_unit:
        results = run_diagnose(plan, on_unit=on_unit)
    show(results, run.out, as_json=run.as_json)


def _rolled(
    study: str,
    variants: tuple[Variant, ...],
    run: RunOptions,
    *,
    window: int | None = None,
    also: tuple[str, ...] = (),
    long: bool = False,
) -> Results:
    from videokv.studies.rollouts import RolloutPlan, run_rollouts

    plan = RolloutPlan(
        study, variants, run.out, command(), run.clips, run.chunks, run.seed, run.device, window,
        long, also, run.workers, run.ray,
    )  # fmt: skip
    with progress() as on_unit:
        return run_rollouts(plan, on_unit=on_unit)


def split(text: str) -> tuple[str, ...]:
    """Names between commas; ValueError where there are none."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError("expected names with commas between, got none")
    return names


def integers(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    try:
        return tuple(int(part) for part in split(text))
    except ValueError as error:
        raise ValueError(
            f"--{option} takes whole numbers with commas between, got {text!r}"
        ) from error


@contextmanager
def progress() -> Iterator[OnUnit]:
    """A bar on a terminal, plain lines elsewhere; both on stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda key, done, total: print(f"{done}/{total}: {key}", file=sys.stderr, flush=True)
        return
    with Bar(console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda key, done, total: bar.update(
            task, description=key, completed=done, total=total
        )


def show(results: Results, out: Path, *, as_json: bool) -> None:
    """Figures and report.html in the folder; the summary on the terminal, or results.json."""
    from videokv.report.study_page import write_study_page

    page = write_study_page(out)
    if as_json:
        print(json.dumps(results.as_json(), indent=1, allow_nan=False))
        return
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    console.print(table(results))
    for name, why in results.not_available.items():
        print(f"{name} is not available: {why}")
    print(f"written  {out / 'results.json'}\nreport   {page}")


def table(results: Results, *, hidden: Sequence[str] = HIDDEN) -> Table:
    """Recipes down, metrics across; ± is the standard error, shown from eight cases up."""
    metrics = [m for m in dict.fromkeys(r.metric for r in results.rows) if m not in hidden]
    metrics = [m for m in metrics if not is_of_one_chunk(m)] or metrics
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("recipe", no_wrap=True)
    for metric in metrics:
        shown.add_column(metric.replace("_", " "), justify="right", overflow="fold")
    for name in results.recipes:
        cells = []
        for metric in metrics:
            line = results.find(name, metric)
            if line is None:
                cells.append("–")
                continue
            error = "" if line.printed_sem is None else f"\n±{line.printed_sem:.2g}"
            cells.append(f"{line.mean:.4g}{error}")
        shown.add_row(name, *cells)
    return shown


def memory(
    recipes: Recipes = "bf16,quarot-2bit,qvg-2bit,quantwm-2bit",
    models: Annotated[
        str | None, typer.Option(help="Models with commas between; all that are known.")
    ] = None,
    budget_gib: Annotated[
        float, typer.Option(help="GiB for the cache alone, without weights and activations.")
    ] = 24.0,
    frames: Annotated[int, typer.Option(help="Latent frames whose bytes are shown.")] = 24,
    measure: Annotated[
        bool,
        typer.Option(help="Also run the world model, and SmolLM2 where it is installed, a little."),
    ] = True,
    out: Out = Path("videokv-memory"),
    as_json: AsJson = False,
) -> None:
    """Bytes and the longest rollout of real models within a budget, at 480p and 720p.

    Counted: bits from chunks that are really packed, shapes from the models' sources. The peak
    holds the packed past, the current chunk in BF16 and one layer's past decoded. Below, what the
    models that run here really held, beside the formula's figure for the same shape.
    """
    from videokv.report.study_page import write_study_page
    from videokv.studies.memory import MODEL_NAMES, run_memory

    names = MODEL_NAMES if models is None else split(models)
    results = run_memory(
        out, recipes=split(recipes), models=names, budget_gib=budget_gib, frames=frames,
        command=command(), measure=measure,
    )  # fmt: skip
    page = write_study_page(out)
    if as_json:
        print(json.dumps(results.as_json(), indent=1, allow_nan=False))
        return
    _memory_table(results, budget_gib)
    _measured_table(results)
    print(f"written  {out / 'results.json'}\nreport   {page}")


def _memory_table(results: Results, budget_gib: float) -> None:
    gib = 2**30
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("model", no_wrap=True)
    for name in results.recipes:
        shown.add_column(f"{name}\n[not bold]GiB | longest", justify="right", no_wrap=True)
    values = {(row.case, row.recipe, row.metric): row.value for row in results.rows}
    for case in _cases_with(results, "longest_latent_frames"):
        cells = [
            f"{values[case, name, 'held_bytes'] / gib:.2f} | "
            f"{values[case, name, 'longest_latent_frames']:.0f}"
            for name in results.recipes
        ]
        shown.add_row(case, *cells)
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    console.print(shown)
    print(f"longest: latent frames whose peak fits {budget_gib:g} GiB")


def _cases_with(results: Results, metric: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.case for row in results.rows if row.metric == metric))


def _measured_table(results: Results) -> None:
    values = {(row.case, row.recipe, row.metric): row.value for row in results.rows}
    for case in _cases_with(results, "formula_bytes"):
        print(f"\n{case}: bytes held | by the formula | difference")
        for name in results.recipes:
            if (case, name, "formula_bytes") in values:
                cells = (values[case, name, f"{what}_bytes"] for what in ("held", "formula"))
                off = values[case, name, "difference_bytes"]
                print(f"  {name:<24}" + " | ".join(f"{v:,.0f}" for v in cells) + f" | {off:+,.0f}")
    for name, text in results.versions.items():
        if name.startswith("measured minus formula"):
            print(f"{name}: {text}")
    for name, why in results.not_available.items():
        print(f"{name} is not available: {why}")


def figures(
    folder: Annotated[Path, typer.Argument(help="A study's folder, with its results.json.")],
    clip: Annotated[str, typer.Option(help="Clip whose frames are shown.")] = "clip-000",
) -> None:
    """Draw a finished study again: PNG, SVG and data into FOLDER/figures, and its report.html."""
    from videokv.report.figures.from_folder import save_figures
    from videokv.report.study_page import write_study_page

    for path in save_figures(folder, clip=clip):
        print(path)
    print(write_study_page(folder))


COMMANDS = (compare, diagnose, tradeoff, ablate, kvsplit, memory, longrun, figures)
