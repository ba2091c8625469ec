"""``videokv bench``: the command's options, what it prints and writes."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

BASELINES = ("triton", "flash-attn-4", "quant-videogen")
DEFAULT_OUT = Path("benchmarks/results")


def bench(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Run this section; repeat it for several. Default: all."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seconds: Annotated[
        float, typer.Option(help="Sections that have not begun by then are left out.")
    ] = 1500.0,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Small tensors: shows that it runs, not how fast.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the files.")] = DEFAULT_OUT,
    check: Annotated[
        Path | None,
        typer.Option(help="Print every target of this file beside its figure; 1 if one is missed."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON when it is done.")
    ] = False,
) -> None:
    """Time the kernels against cuDNN, FlashAttention, FlexAttention and Quant-VideoGen.

    In one run, each result checked before it is timed. Sections: copy, reconstruct, dense,
    attention, encode, end_to_end, decode, curve. Writes two files called after the GPU: NAME.json
    (figures) and NAME.run.json (machine, versions, what was left out or failed); figures of
    sections that are not run again are kept. Exits 1 if a section failed.
    """
    from videokv.studies import bench as study

    if check is not None:
        _check(study, check)
        return
    from videokv.outputs import check_folder
    from videokv.studies.bench_sections import SECTIONS

    if not seconds > 0:
        raise ValueError(f"--seconds must be above 0, got {seconds:g}")
    check_folder(out)
    place = _device(device)
    sizes = study.Sizes.tiny() if tiny else study.Sizes()
    say = _to_stderr if as_json else print
    run = study.Bench(place, sizes, seconds, say, judged=not tiny)
    study.run(run, SECTIONS, only=only or ())
    name = _slug(place) + ("-tiny" if tiny else "")
    path, facts = study.write(run, out, name=name, run_facts=_facts(place))
    say(f"\nfigures {path}\nrun     {facts}")
    if run.curve:
        _plot(run.curve, out, name, say)
    if as_json:
        print(json.dumps([vars(figure) for figure in run.figures], indent=1, allow_nan=False))
    if run.failures:
        say(f"{len(run.failures)} failed:\n  " + "\n  ".join(run.failures))
        raise typer.Exit(1)


def _plot(curve: list[dict[str, Any]], out: Path, name: str, say: Any) -> None:
    """<gpu>-curve.png, .svg and .json, where the plots' packages are there."""
    from videokv.report.figures.bench_curve import save_bench_curve

    try:
        say(f"curve   {save_bench_curve(curve, out, name=f'{name}-curve')[0]}")
    except ImportError as error:
        say(f"curve   not drawn: {error}")


def _check(study: Any, path: Path) -> None:
    """Every target of a file, and 1 where one is missed."""
    aimed = [figure for figure in study.read(path) if figure.target is not None]
    for figure in aimed:
        print(study.line(figure))
    missed = study.short(aimed)
    print(f"\n{len(aimed) - len(missed)} of {len(aimed)} targets are met")
    if missed:
        raise typer.Exit(1)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from error
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{name!r} was asked for, but PyTorch sees no GPU")
    return found


def _slug(device: torch.device) -> str:
    """The GPU's name for a file: "NVIDIA H200" is nvidia-h200."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _facts(device: torch.device) -> dict[str, Any]:
    """What the figures were made on and with."""
    from videokv.studies.results import versions

    found = dict(versions())
    for package in BASELINES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": " ".join(sys.argv[1:]),
        "versions": found,
    }


def _commit() -> str:
    """Of the checkout that runs, or "unknown" outside of one."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)
