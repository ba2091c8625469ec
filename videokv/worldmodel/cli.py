"""The ``worldmodel`` commands: data, train, sample, evaluate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from videokv.devices import resolve_device
from videokv.outputs import check_file, check_folder, describe
from videokv.stopping import INTERRUPTED
from videokv.worldmodel.clips import (
    Clips,
    clips_from_split,
    load_clips,
    make_clips,
    save_clips,
)
from videokv.worldmodel.config import WorldModelConfig
from videokv.worldmodel.data import HELDOUT_SEED, generate_split, load_split
from videokv.worldmodel.evaluate import evaluate as evaluate_model
from videokv.worldmodel.evaluate import print_table, save_sheet
from videokv.worldmodel.plain import PlainCache
from videokv.worldmodel.sampler import rollout
from videokv.worldmodel.training import TrainingOptions
from videokv.worldmodel.training import train as train_model
from videokv.worldmodel.weights import load_weights

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="The small world model that is shipped.")
_console = Console(stderr=True)

Weights = Annotated[Path | None, typer.Option(help="Weights file; the shipped one by default.")]
Device = Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda or cuda:1.")]


@contextmanager
def _errors() -> Iterator[None]:
    """Bad input, missing extras and refused files: one line and exit code 2. Ctrl-C: 130."""
    try:
        yield
    except KeyboardInterrupt:
        _console.print("stopped", highlight=False)
        raise typer.Exit(INTERRUPTED) from None
    except ImportError as error:
        _say_error(str(error))
        raise typer.Exit(2) from None
    except OSError as error:
        _say_error(describe(error))
        raise typer.Exit(2) from None
    except ValueError as error:
        _say_error(str(error))
        raise typer.Exit(2) from None


def _say_error(message: str) -> None:
    line = Text.assemble(("error:", "red"), f" {message}")  # no markup: paths may hold brackets
    _console.print(line, highlight=False, soft_wrap=True)


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    with Progress(console=_console, transient=True, disable=not _console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}")


def _autocast(device: str) -> torch.dtype | None:
    """BF16 matrix products on a GPU, the weights' float32 on a CPU."""
    return torch.bfloat16 if device.startswith("cuda") else None


@app.command()
def data(
    out: Annotated[Path, typer.Option(help="Folder; gets train/ and heldout/.")],
    train_frames: Annotated[int, typer.Option(help="Frames to train on, about.")] = 400_000,
    heldout_frames: Annotated[int, typer.Option(help="Frames held out, about.")] = 16_000,
    walk_frames: Annotated[int, typer.Option(help="Frames of one walk.")] = 250,
    workers: Annotated[int, typer.Option(help="Games played at once.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the first walk.")] = 0,
) -> None:
    """Play ViZDoom and keep what was seen."""
    with _errors():
        most = min(train_frames, heldout_frames) // walk_frames if walk_frames > 0 else 0
        if most < 1 or not 0 <= seed < HELDOUT_SEED // 2:
            raise ValueError(
                "walk_frames must be positive and fit both splits, and seed within "
                f"0..{HELDOUT_SEED // 2 - 1}; got {walk_frames} and {seed}"
            )
        check_folder(out)
        splits = (("train", train_frames, seed), ("heldout", heldout_frames, HELDOUT_SEED + seed))
        for name, frames, first in splits:
            with _bar(f"playing {name}") as bar:
                folder = generate_split(
                    out / name,
                    episodes=frames // walk_frames,
                    frames=walk_frames,
                    first_seed=first,
                    workers=workers,
                    progress=bar,
                )
            typer.echo(f"{folder}: {frames // walk_frames} walks of {walk_frames} frames")


@app.command()
def train(
    data: Annotated[Path, typer.Option(help="Folder with a split, such as DATA/train.")],
    out: Annotated[Path, typer.Option(help="Folder for log, checkpoint and weights.")],
    minutes: Annotated[float | None, typer.Option(help="Budget in minutes.")] = None,
    steps: Annotated[int | None, typer.Option(help="Budget in steps.")] = None,
    batch: Annotated[int, typer.Option(help="Clips a step.")] = 12,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 6e-4,
    flip: Annotated[float, typer.Option(help="Share of mirrored clips.")] = 0.0,
    ema: Annotated[float, typer.Option(help="Decay of the averaged weights.")] = 0.999,
    t_mean: Annotated[float, typer.Option(help="Mean logit of the noise level.")] = 0.8,
    history_t: Annotated[float, typer.Option(help="Most noise in the history.")] = 0.15,
    seed: Annotated[int, typer.Option(help="Of weights and draws.")] = 0,
    compile: Annotated[bool, typer.Option(help="Compile the step (CUDA).")] = True,
    device: Device = "auto",
) -> None:
    """Train the model; resumes from OUT/checkpoint.pt where there is one."""
    with _errors():
        options = TrainingOptions(
            minutes=minutes,
            steps=steps,
            batch=batch,
            peak_learning_rate=learning_rate,
            flip=flip,
            ema=ema,
            t_mean=t_mean,
            history_t=history_t,
            seed=seed,
            compile=compile,
        )
        check_folder(out)
        config, where = WorldModelConfig(), str(resolve_device(device))
        typer.echo(train_model(load_split(data), out, options=options, config=config, device=where))


@app.command()
def sample(
    out: Annotated[Path, typer.Option(help="Folder for one lossless WebP a clip.")],
    weights: Weights = None,
    clips: Annotated[int, typer.Option(help="Shipped clips to start from.")] = 2,
    chunks: Annotated[int, typer.Option(help="Chunks to generate.")] = 10,
    steps: Annotated[int | None, typer.Option(help="Euler steps a chunk.")] = None,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    device: Device = "auto",
) -> None:
    """Roll shipped clips out with a plain cache."""
    with _errors(), _bar("generating") as bar:
        _check_seed(seed)
        check_folder(out)
        where, real = str(resolve_device(device)), load_clips(clips)
        model = load_weights(weights, device=where)
        cache = PlainCache(layers=model.config.blocks, window_chunks=model.config.window_chunks)
        frames = rollout(
            model,
            real.frames[:, :6],
            real.actions,
            cache,
            chunks=chunks,
            steps=steps,
            seed=seed,
            autocast=_autocast(where),
            progress=bar,
        )
        actions = real.actions[:, 6 : 6 + frames.shape[1]]
        save_clips(out, Clips(frames, actions, "generated"))
    typer.echo(f"{out}: {len(frames)} clips of {frames.shape[1]} frames")


@app.command()
def evaluate(
    weights: Weights = None,
    clips: Annotated[int, typer.Option(help="Held-out clips.")] = 8,
    data: Annotated[
        Path | None, typer.Option(help="Take clips from this held-out split instead.")
    ] = None,
    any_view: Annotated[
        bool, typer.Option(help="Also take new clips whose view stays the same.")
    ] = False,
    chunks: Annotated[int, typer.Option(help="Chunks to generate.")] = 10,
    steps: Annotated[int | None, typer.Option(help="Euler steps a chunk.")] = None,
    shift: Annotated[float | None, typer.Option(help="Shift of the steps to noise.")] = None,
    seed: Annotated[int, typer.Option(help="Of the noise and of new clips.")] = 0,
    batch: Annotated[int, typer.Option(help="Clips at a time.")] = 16,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, no table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet (PNG).")] = None,
    device: Device = "auto",
) -> None:
    """Compare rollouts with the real game: shipped clips first, more played with ViZDoom."""
    with _errors(), _bar("generating") as bar:
        _check_seed(seed)
        for path in (out, sheet):
            if path is not None:
                check_file(path)
        where = str(resolve_device(device))
        model = load_weights(weights, device=where)
        real = _real_clips(clips, data, seed=seed, view_changes=not any_view)
        result = evaluate_model(
            model,
            real,
            chunks=chunks,
            steps=steps,
            shift=shift,
            seed=seed,
            batch=batch,
            autocast=_autocast(where),
            progress=bar,
        )
        if out is not None:
            out.write_text(result.to_json())
        if sheet is not None:
            save_sheet(sheet, real, result.generated)
    if json:
        typer.echo(result.to_json())
    else:
        print_table(result)


def _real_clips(n: int, data: Path | None, *, seed: int, view_changes: bool) -> Clips:
    if data is not None:
        return clips_from_split(load_split(data), n, seed=seed, view_changes=view_changes)
    shipped = load_clips()
    if n <= len(shipped):
        return load_clips(n)
    return shipped.joined(make_clips(n - len(shipped), seed, view_changes=view_changes))
