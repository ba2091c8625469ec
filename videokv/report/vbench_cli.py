"""``videokv vbench``: choose prompts, export videos under VBench's names, score them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from videokv.report.run_options import AsJson

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="VBench-Long: prompts by share, videos under its names, scores where it is installed.",
)

Dimensions = Annotated[
    str | None, typer.Option(help="Dimensions with commas between; default: all there are.")
]
PromptList = Annotated[
    Path | None,
    typer.Option(
        help="JSON: dimension to list of prompts, or VBench's own list. Default: that of the "
        "installed package vbench."
    ),
]
Share = Annotated[float, typer.Option(help="Of each dimension's prompts, from the first.")]


@app.command()
def prompts(
    prompts: PromptList = None,
    share: Share = 0.3,
    dimensions: Dimensions = None,
    as_json: AsJson = False,
) -> None:
    """The prompts to generate, with the file name that `export` looks for under --videos."""
    from videokv.metrics.vbench_files import file_name, first_share

    chosen = first_share(_prompts(prompts, dimensions), share=share)
    if as_json:
        print(json.dumps(chosen, indent=1))
        return
    for dimension, listed in chosen.items():
        for prompt in listed:
            print(f"{dimension}\t{file_name(prompt, 0)}\t{prompt}")


@app.command()
def export(
    out: Annotated[Path, typer.Argument(help="Folder for the videos by dimension.")],
    videos: Annotated[
        Path | None,
        typer.Option(help="Folder with a video for each prompt: <prompt>-0.mp4, -1.mp4, ..."),
    ] = None,
    study: Annotated[
        Path | None, typer.Option(help="Or a study's folder with frames of the world model.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="With --study: whose frames.")] = None,
    prompts: PromptList = None,
    share: Share = 0.3,
    dimensions: Dimensions = None,
) -> None:
    """Put videos under the names that VBench matches prompts by, and list them in prompts.json.

    From --videos: of the first --share of each dimension's prompts. From --study: every clip of a
    recipe, in the dimensions that look at the video alone (the world model has no prompts).
    A video that is missing or shorter than the clips its dimension is scored on is refused.
    """
    from videokv.metrics.vbench_export import export_study, export_videos
    from videokv.metrics.vbench_files import first_share
    from videokv.studies.variants import path_name

    if (videos is None) == (study is None):
        raise ValueError("give --videos with a video for each prompt, or --study with --recipe")
    if study is not None:
        if recipe is None:
            raise ValueError("--study needs --recipe, whose frames are to be exported")
        if prompts is not None:
            raise ValueError("--study takes no --prompts: the world model has none")
        some = None if dimensions is None else _names(dimensions)
        written = export_study(study / "frames" / path_name(recipe), out, dimensions=some)
    else:
        assert videos is not None
        chosen = first_share(_prompts(prompts, dimensions), share=share)
        written = export_videos(videos, chosen, out)
    print(f"{len(written)} videos  {out}\nlist  {out / 'prompts.json'}")


@app.command()
def score(
    folder: Annotated[Path, typer.Argument(help="What `videokv vbench export` wrote.")],
    dimensions: Dimensions = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """VBench-Long over exported videos; the totals where all sixteen dimensions were scored.

    Needs VBench and the weights of each dimension; says which is missing otherwise, and exits 2.
    Errors are over prompts, propagated to totals.
    """
    from videokv.metrics.vbench import DIMENSIONS, totals
    from videokv.metrics.vbench_files import read_prompts
    from videokv.metrics.vbench_run import score_folder

    exported = {entry.dimension for entry in read_prompts(folder)}
    there = tuple(name for name in DIMENSIONS if name in exported)
    names = there if dimensions is None else _names(dimensions)
    scores = score_folder(folder, names, device=device)
    found: dict[str, Any] = {name: asdict(score) for name, score in scores.items()}
    if set(scores) == set(DIMENSIONS):
        whole = totals(scores)
        found |= {n: asdict(getattr(whole, n)) for n in ("quality", "semantic", "total")}
    if as_json:
        print(json.dumps(found, indent=1, allow_nan=False))
        return
    for name, figure in found.items():
        error = "" if figure["sem"] is None else f" ± {figure['sem']:.4f}"
        print(f"{name:<24} {figure['mean']:.4f}{error}")


def _prompts(path: Path | None, dimensions: str | None) -> dict[str, list[str]]:
    from videokv.metrics.vbench_export import read_prompt_list

    found = read_prompt_list(path)
    if dimensions is None:
        return found
    names = _names(dimensions)
    absent = [name for name in names if name not in found]
    if absent:
        raise ValueError(f"no prompts for {absent[0]!r}; there are some for {', '.join(found)}")
    return {name: found[name] for name in names}


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError("--dimensions names none; give names with commas between, or leave it")
    return names
