"""The options that all studies of rollouts share, declared once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

Out = Annotated[Path, typer.Option(help="Folder for results; the same command resumes in it.")]
ClipCount = Annotated[int, typer.Option(help="Clips of real play to start from; 8 are shipped.")]
ChunkCount = Annotated[int, typer.Option(help="Chunks of 3 frames to generate, at most 10.")]
Seed = Annotated[int, typer.Option(help="Of the noise; the same for every recipe.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
Workers = Annotated[int, typer.Option(help="Processes; the rows are the same for any number.")]
Ray = Annotated[
    str | None, typer.Option("--ray", help="Address of a Ray cluster to run on instead.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")]


@dataclass(frozen=True)
class RunOptions:
    """How much to run, where, and what to print."""

    out: Out
    clips: ClipCount
    chunks: ChunkCount
    seed: Seed
    device: Device
    workers: Workers
    ray: Ray
    as_json: AsJson


def with_run_options(
    *, out: str, chunks: int, chunks_option: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose last parameter is ``run: RunOptions`` takes those options one by one.

    out, chunks: their defaults. chunks_option: False where the study decides the length itself.
    """
    defaults: dict[str, Any] = {
        "out": Path(out), "clips": 8, "chunks": chunks, "seed": 0, "device": "auto", "workers": 1,
        "ray": None, "as_json": False,
    }  # fmt: skip
    types = get_type_hints(RunOptions, include_extras=True)
    offered = [name for name in types if name != "chunks" or chunks_option]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        *own, _ = inspect.signature(command).parameters.values()
        own = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
        shared = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=types[name]
            )
            for name in offered
        ]

        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            run = RunOptions(**{**defaults, **{name: values.pop(name) for name in offered}})
            command(**values, run=run)

        signature = inspect.Signature([*own, *shared])
        wrapped.__signature__ = signature  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        del wrapped.__wrapped__  # type: ignore[attr-defined]
        return wrapped

    return decorate
