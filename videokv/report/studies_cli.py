"""The commands of the studies: options → plan → table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from videokv.command_line import command
from videokv.studies.results import Results
from videokv.studies.rollouts import OnUnit

PLAIN_WIDTH = 140
HIDDEN = ("held_bytes", "dense_bytes", "psnr_pooled_db", "sharpness", "identical_frames")

Out = Annotated[Path, typer.Option(help="Folder for results; the same command resumes in it.")]
ClipCount = Annotated[int, typer.Option(help="Clips of real play to start from; 8 are shipped.")]
ChunkCount = Annotated[int, typer.Option(help="Chunks of 3 frames to generate, at most 10.")]
Seed = Annotated[int, typer.Option(help="Of the noise; the same for every recipe.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
Window = Annotated[int | None, typer.Option(help="Chunks the cache keeps. Default: the model's.")]
Workers = Annotated[int, typer.Option(help="Processes; the rows are the same for any number.")]
Ray = Annotated[
    str | None, typer.Option("--ray", help="Address of a Ray cluster to run on instead.")
]
Recipes = Annotated[str, typer.Option(help="Recipes with commas between; see: videokv recipes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")]

COMPARED = "rtn-2bit,quarot-2bit,quarot-2bit+taylor,quarot-2bit+calibrated,qvg-2bit,quantwm-2bit"
DIAGNOSED = (
    "rtn-2bit,rtn-2bit+taylor,quarot-2bit,quarot-2bit+taylor,quarot-2bit+calibrated,qvg-2bit,"
    "quantwm-2bit"
)


def compare(
    recipes: Recipes = COMPARED,
    out: Out = Path("videokv-compare"),
    clips: ClipCount = 8,
    chunks: ChunkCount = 4,
    seed: Seed = 0,
    device: Device = "auto",
    window: Window = None,
    also: Annotated[
        str | None, typer.Option(help="More metrics: lpips_alex, lpips_vgg, flip.")
    ] = None,
    workers: Workers = 1,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Any recipes on the shipped world model, each against the rollout with the BF16 cache."""
    from videokv.studies.grids import compare_variants
    from videokv.studies.rollouts import RolloutPlan, run_rollouts

    plan = RolloutPlan(
        "compare", compare_variants(split(recipes)), out, command(), clips, chunks, seed, device,
        window, also=() if also is None else split(also), workers=workers, ray=ray,
    )  # fmt: skip
    with progress() as on_unit:
        results = run_rollouts(plan, on_unit=on_unit)
    show(results, out, as_json=as_json)


def kvsplit(
    recipes: Recipes = "qvg-2bit,rtn-2bit,quarot-2bit",
    out: Out = Path("videokv-kvsplit"),
    clips: ClipCount = 8,
    chunks: ChunkCount = 4,
    seed: Seed = 0,
    device: Device = "auto",
    workers: Workers = 1,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Keys alone at 2 bits (K2V16), values alone (K16V2), both (K2V2)."""
    from videokv.studies.grids import kvsplit_variants
    from videokv.studies.rollouts import RolloutPlan, run_rollouts

    plan = RolloutPlan(
        "kvsplit", kvsplit_variants(split(recipes)), out, command(), clips, chunks, seed, device,
        workers=workers, ray=ray,
    )  # fmt: skip
    with progress() as on_unit:
        results = run_rollouts(plan, on_unit=on_unit)
    show(results, out, as_json=as_json)


def tradeoff(
    family: Annotated[str, typer.Option(help="Quantizer, with 2, 3 and 4 bits.")] = "quarot",
    bits: Annotated[str, typer.Option(help="Widths, with commas.")] = "2,3,4",
    groups: Annotated[str, typer.Option(help="Group sizes, with commas.")] = "32,64,128",
    correction: Annotated[str, typer.Option(help="With it and without it.")] = "taylor",
    out: Out = Path("videokv-tradeoff"),
    clips: ClipCount = 8,
    chunks: ChunkCount = 4,
    seed: Seed = 0,
    device: Device = "auto",
    workers: Workers = 1,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Bits against quality over widths and group sizes, with and without a correction.

    on_pareto_front is 1 where no other recipe is as small and better in psnr_db.
    """
    from videokv.report.figures import save_tradeoff
    from videokv.studies.grids import pareto_rows, tradeoff_variants
    from videokv.studies.rollouts import RolloutPlan, run_rollouts, with_rows

    variants = tradeoff_variants(
        family, bits=integers(bits, "bits"), groups=integers(groups, "groups"),
        correction=correction,
    )  # fmt: skip
    plan = RolloutPlan(
        "tradeoff", variants, out, command(), clips, chunks, seed, device,
        workers=workers, ray=ray,
    )  # fmt: skip
    with progress() as on_unit:
        results = run_rollouts(plan, on_unit=on_unit)
    results = with_rows(results, pareto_rows(results), out)
    save_tradeoff(results, out / "figures")
    show(results, out, as_json=as_json)


def ablate(
    parts: Annotated[
        str,
        typer.Option(
            help="Any of qsac-psac, rank, candidates, metric, centroids, correction, policy."
        ),
    ] = "qsac-psac,rank,candidates,metric,centroids,correction,policy",
    out: Out = Path("videokv-ablate"),
    clips: ClipCount = 8,
    chunks: ChunkCount = 4,
    seed: Seed = 0,
    device: Device = "auto",
    workers: Workers = 1,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """QuantWM's parts, ranks, candidates and centroids; kinds of correction; sink and recent."""
    from videokv.studies.grids import ablate_variants
    from videokv.studies.rollouts import RolloutPlan, run_rollouts

    plan = RolloutPlan(
        "ablate", ablate_variants(split(parts)), out, command(), clips, chunks, seed, device,
        workers=workers, ray=ray,
    )  # fmt: skip
    with progress() as on_unit:
        results = run_rollouts(plan, on_unit=on_unit)
    show(results, out, as_json=as_json)


def longrun(
    recipes: Recipes = "rtn-2bit,quarot-2bit,quarot-2bit+calibrated,quantwm-2bit",
    out: Out = Path("videokv-longrun"),
    clips: ClipCount = 8,
    seed: Seed = 0,
    device: Device = "auto",
    window: Window = None,
    workers: Workers = 1,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """As long as the clips last (10 chunks), with the PSNR of every chunk."""
    from videokv.report.figures.curves import psnr_by_chunk, save_by_chunk
    from videokv.studies.grids import compare_variants
    from videokv.studies.rollout import MAX_CHUNKS
    from videokv.studies.rollouts import RolloutPlan, run_rollouts

    plan = RolloutPlan(
        "longrun", compare_variants(split(recipes)), out, command(), clips, MAX_CHUNKS, seed,
        device, window, chunk_rows=True, workers=workers, ray=ray,
    )  # fmt: skip
    with progress() as on_unit:
        results = run_rollouts(plan, on_unit=on_unit)
    save_by_chunk(psnr_by_chunk(results), out / "figures", metric="psnr_db")
    show(results, out, as_json=as_json)


def diagnose(
    recipes: Recipes = DIAGNOSED,
    out: Out = Path("videokv-diagnose"),
    clips: ClipCount = 8,
    chunks: ChunkCount = 2,
    seed: Seed = 0,
    device: Device = "auto",
    layers: Annotated[str | None, typer.Option(help="Layers from 0, with commas; all.")] = None,
    steps: Annotated[str, typer.Option(help="Denoising steps from 0, with commas.")] = "0,3,7",
    workers: Workers = 1,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """What caches do to attention with the same queries: mass, divergence, outputs, tokens."""
    from videokv.report.figures import save_diagnostics
    from videokv.studies.diagnose import DiagnosePlan, run_diagnose
    from videokv.studies.variants import variant

    plan = DiagnosePlan(
        tuple(variant(name) for name in split(recipes)), out, command(), clips, chunks, seed,
        device, None if layers is None else integers(layers, "layers"),
        integers(steps, "steps"), workers, ray,
    )  # fmt: skip
    with progress() as on_unit:
        results = run_diagnose(plan, on_unit=on_unit)
    save_diagnostics(json.loads((out / "diagnostics.json").read_text()), out / "figures")
    show(results, out, as_json=as_json)


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
    """The summary on the terminal, or results.json."""
    if as_json:
        print(json.dumps(results.as_json(), indent=1, allow_nan=False))
        return
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    console.print(table(results))
    print(f"written  {out / 'results.json'}")


def table(results: Results, *, hidden: Sequence[str] = HIDDEN) -> Table:
    """Recipes down, metrics across; ± is the standard error, shown from eight cases up."""
    metrics = [m for m in dict.fromkeys(r.metric for r in results.rows) if m not in hidden]
    metrics = [m for m in metrics if not m.startswith("psnr_chunk_")] or metrics
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
    out: Out = Path("videokv-memory"),
    as_json: AsJson = False,
) -> None:
    """Bytes and the longest rollout of real models within a budget, at 480p and 720p.

    Counted: bits from chunks that are really packed, shapes from the models' sources. The peak
    holds the packed past, the current chunk in BF16 and one layer's past decoded.
    """
    from videokv.report.figures import save_memory
    from videokv.report.figures.from_folder import held_by_model
    from videokv.studies.memory import MODEL_NAMES, run_memory

    names = MODEL_NAMES if models is None else split(models)
    results = run_memory(
        out, recipes=split(recipes), models=names, budget_gib=budget_gib, frames=frames,
        command=command(),
    )  # fmt: skip
    save_memory(held_by_model(results), out / "figures", title=f"{frames} latent frames at 480p")
    if as_json:
        print(json.dumps(results.as_json(), indent=1, allow_nan=False))
        return
    _memory_table(results, budget_gib)
    print(f"written  {out / 'results.json'}")


def _memory_table(results: Results, budget_gib: float) -> None:
    gib = 2**30
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("model", no_wrap=True)
    for name in results.recipes:
        shown.add_column(f"{name}\n[not bold]GiB | longest", justify="right", no_wrap=True)
    values = {(row.case, row.recipe, row.metric): row.value for row in results.rows}
    for case in dict.fromkeys(row.case for row in results.rows):
        cells = [
            f"{values[case, name, 'held_bytes'] / gib:.2f} | "
            f"{values[case, name, 'longest_latent_frames']:.0f}"
            for name in results.recipes
        ]
        shown.add_row(case, *cells)
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    console.print(shown)
    print(f"longest: latent frames whose peak fits {budget_gib:g} GiB")


def figures(
    folder: Annotated[Path, typer.Argument(help="A study's folder, with its results.json.")],
    clip: Annotated[str, typer.Option(help="Clip whose frames are shown.")] = "clip-000",
) -> None:
    """Draw a finished study: PNG, SVG and data into FOLDER/figures; frames and differences too."""
    from videokv.report.figures.from_folder import save_figures

    for path in save_figures(folder, clip=clip):
        print(path)


COMMANDS = (compare, diagnose, tradeoff, ablate, kvsplit, memory, longrun, figures)
