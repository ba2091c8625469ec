"""``videokv run``: a real model from the user's checkout, by the repository's own script."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from videokv.studies.checkout import CHECKOUTS, RunOptions, run_checkout


def run(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(CHECKOUTS)}.")],
    repo: Annotated[Path, typer.Option(help="Folder of the repository's checkout.")],
    recipe: Annotated[
        str, typer.Option(help="Recipe of the cache; see 'videokv recipes'.")
    ] = "quarot-2bit+calibrated",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Weights, as the repository's script takes them.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The repository's config. Default: its usual one.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What the video shows; repeat it for several.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the videos.")] = Path("videokv-run"),
    frames: Annotated[int | None, typer.Option(help="Latent frames to generate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the script's noise.")] = None,
    more: Annotated[
        list[str] | None, typer.Argument(help="After --: further arguments of the script.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON on stdout.")
    ] = False,
) -> None:
    """Generate with a real model whose KV cache is kept as a recipe says.

    Runs the repository's own script from your checkout, with the weights you have; it needs an
    NVIDIA GPU and what the repository needs. At the end: the bytes that the last video's cache
    held.
    """
    options = RunOptions(
        checkpoint=checkpoint,
        config=config,
        prompts=tuple(prompt or ()),
        out=out,
        frames=frames,
        seed=seed,
        more=tuple(more or ()),
    )
    kv = run_checkout(model, repo, recipe, options)
    memory = kv.memory()
    if as_json:
        figures = {"model": model, "recipe": recipe, **dataclasses.asdict(memory)}
        print(json.dumps(figures, indent=1, allow_nan=False))
    else:
        print(f"{model}, {recipe}: {memory}")
