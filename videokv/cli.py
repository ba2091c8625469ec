"""The command line: parse, check, hand to a study, show its result.

Exit codes: 0 done, 1 failed, 2 wrong usage or input, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import videokv
from videokv.command_line import record
from videokv.outputs import describe
from videokv.report import studies_cli
from videokv.report.bench_cli import bench
from videokv.report.claims_cli import claims
from videokv.report.vbench_cli import app as vbench_app
from videokv.stopping import INTERRUPTED
from videokv.studies.prefill_cli import prefill
from videokv.studies.run_cli import run
from videokv.worldmodel.cli import app as worldmodel_app

DONE, FAILED, WRONG_USAGE = 0, 1, 2


class Commands(TyperGroup):
    """A group in which Ctrl-C ends with its own exit code and no traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _say("stopped")
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # paragraphs of help are wrapped to the terminal
    pretty_exceptions_enable=False,
    help="The KV cache of video world models at 2 bits, with attention kept unbiased.",
)
app.add_typer(worldmodel_app, name="worldmodel")
app.add_typer(vbench_app, name="vbench")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")]


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (sys.argv unless given) and return its exit code."""
    record(sys.argv[1:] if arguments is None else arguments)
    try:
        app(args=arguments, prog_name="videokv")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    except ValueError as error:
        _say(f"error: {error}")
        return WRONG_USAGE
    except KeyboardInterrupt:
        _say("stopped")
        return INTERRUPTED
    except OSError as error:
        _say(f"error: {describe(error)}")
        return WRONG_USAGE
    return DONE


def _print_version(asked: bool) -> None:
    if asked:
        print(videokv.__version__)
        raise typer.Exit(DONE)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of the program itself; --version acts in its callback."""


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for video, report and results; resumed if begun before.")
    ] = Path("videokv-demo"),
    clips: Annotated[
        int, typer.Option(help="Clips of real play to start from. Figures to quote need 32.")
    ] = 2,
    chunks: Annotated[
        int, typer.Option(help="Chunks of 3 frames to generate in each clip, at most 10.")
    ] = 6,
    seed: Annotated[int, typer.Option(help="Of the noise; the same for every recipe.")] = 0,
    device: Annotated[
        str, typer.Option(help="auto (a GPU where there is one), cpu, cuda or cuda:1.")
    ] = "auto",
    window: Annotated[
        int | None, typer.Option(help="Chunks the cache keeps, 1 to 8. Default: the model's 8.")
    ] = None,
    recipes: Annotated[
        str | None,
        typer.Option(
            help="Recipes with commas between (see: videokv recipes). bf16 is always run: it is "
            "the reference. Default: bf16, rtn and quarot at 2 bits with and without corrections."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a 2-bit KV cache does to a video, and what correcting the attention brings back.

    The small world model that is shipped plays on from a few real frames of a game, once for each
    recipe, with the same noise and actions. The report shows the videos side by side, how far each
    is from the one with the BF16 cache (PSNR, SSIM), how much attention the cached keys drew, and
    the bytes held. Written into the folder: report.html, comparison.mp4, results.json, curves.json
    and the frames. An interrupted demo goes on where it stopped when the command is repeated.
    """
    from videokv.report.demo import write_report
    from videokv.report.terminal import print_results, show_progress
    from videokv.studies.demo import DEFAULT_RECIPES, DemoSettings, run_demo

    names = DEFAULT_RECIPES if recipes is None else _names(recipes)
    settings = DemoSettings(
        out=out, clips=clips, chunks=chunks, seed=seed, device=device, window=window, recipes=names
    )
    try:
        with show_progress() as on_progress:
            run = run_demo(settings, on_progress=on_progress)
        report = write_report(run)
    except KeyboardInterrupt:
        _say(f"stopped; resume with the same command:\n  {settings.command}")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        _print_json(run.results.as_json())
    else:
        print_results(run.results)
        print(f"\nvideo   {report.video}\nreport  {report.page}")


@app.command("recipes")
def list_recipes(
    tokens: Annotated[int, typer.Option(help="Tokens of the chunks that are counted.")] = 324,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 128,
    as_json: AsJson = False,
) -> None:
    """The usual recipes with their bits per element, counted from chunks that are really packed."""
    from rich.table import Table

    from videokv.report.terminal import stdout_console
    from videokv.studies.sizes import recipe_sizes

    sizes = recipe_sizes(tokens=tokens, head_dim=head_dim)
    if as_json:
        _print_json([size.as_json() for size in sizes])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("recipe", "left"), ("bits per element", "right"), ("smaller", "right")):
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("")
    for size in sizes:
        if size.bits_per_element is None or size.ratio is None:
            table.add_row(size.recipe, "–", "–", size.refusal)
        else:
            table.add_row(size.recipe, f"{size.bits_per_element:.3f}", f"{size.ratio:.2f}×", "")
    stdout_console().print(table)


@app.command()
def metrics(
    a: Annotated[Path, typer.Argument(help="Video file, folder of frames, .npz or .npy.")],
    b: Annotated[Path, typer.Argument(help="The reference, with the same frames and size.")],
    under: Annotated[
        str,
        typer.Option(
            "--protocol",
            help="all: every frame. first-chunk: the first --chunk-frames. qvg: Quant VideoGen's "
            "conventions (without frame 0, uniform SSIM window, LPIPS on [0, 1]).",
        ),
    ] = "all",
    chunk_frames: Annotated[int, typer.Option(help="Frames of the first chunk.")] = 3,
    as_json: AsJson = False,
) -> None:
    """PSNR, SSIM, LPIPS, FLIP, flicker and sharpness of video A against reference B.

    psnr_db is the mean over frames of the dB of each, psnr_pooled_db that of the error over all
    frames; both are capped at 100 dB, and identical frames are counted. A metric whose weights or
    package are not here is listed with the reason.
    """
    from videokv.metrics import measure, protocol, read_frames

    chosen = protocol(under, chunk_frames=chunk_frames)
    found = measure(read_frames(a), read_frames(b), under=chosen)
    if as_json:
        _print_json(
            {
                "protocol": found.protocol,
                "protocol_says": chosen.says,
                **found.figures,
                "frames": found.frames,
                "identical_frames": found.identical_frames,
                "not_available": dict(found.missing),
            }
        )
        return
    print(f"{'protocol':<20} {found.protocol}: {chosen.says}")
    for name, value in found.figures.items():
        print(f"{name:<20} {value:.4f}")
    print(f"{'frames':<20} {found.frames}\n{'identical_frames':<20} {found.identical_frames}")
    for name, why in found.missing.items():
        print(f"{name:<20} not available: {why}")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Test this machine: devices, libraries, packing and attention. Exits 1 if a test fails."""
    from dataclasses import asdict

    from videokv.studies.doctor import examine

    checks = examine()
    if as_json:
        _print_json([asdict(check) for check in checks])
    else:
        marks = {True: "ok  ", False: "FAIL", None: "    "}
        for check in checks:
            print(f"{marks[check.ok]} {check.name:<30} {check.detail}")
    if any(check.ok is False for check in checks):
        raise typer.Exit(FAILED)


app.command()(prefill)
app.command()(run)
for study in studies_cli.COMMANDS:
    app.command()(study)
app.command()(claims)
app.command()(bench)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError("--recipes names no recipe; give names with commas between, or leave it")
    return names


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1, allow_nan=False))


def _say(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
