"""What a study shows on the terminal: progress while it runs, a table at its end.

Progress goes to stderr, so that stdout holds the result alone. Where stderr is no terminal, one
plain line is printed for each finished unit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table

from videokv.report.style import COLUMNS
from videokv.studies.demo import REFERENCE, Progress
from videokv.studies.results import Results

PLAIN_WIDTH = 120  # of tables where stdout is no terminal
FIRST_TO_GO = ("sharpness", "held_bytes", "seconds_per_chunk", "ssim")


@contextmanager
def show_progress() -> Iterator[Callable[[Progress], None]]:
    """A callback for ``run_demo``: a bar with the time left, or plain lines."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _print_line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("chunks"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def update(step: Progress) -> None:
            bar.update(task, description=step.recipe, completed=step.done, total=step.total)

        yield update


def print_results(results: Results) -> None:
    """The summary: recipes down, metrics across; ± from eight cases up.

    A narrow terminal gets fewer columns (results.json has them all), never cut ones.
    """
    console = stdout_console()
    found = {line.metric for line in results.summary}
    shown = [metric for metric in COLUMNS if metric in found]
    table = _table(results, shown)
    for metric in FIRST_TO_GO:
        width = console.measure(table, options=console.options.update(width=1000)).maximum
        if width <= console.width:
            break
        shown = [other for other in shown if other != metric]
        table = _table(results, shown)
    console.print(table)


def _table(results: Results, shown: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("recipe", no_wrap=True)
    for metric in shown:
        name, unit, _, _ = COLUMNS[metric]
        table.add_column(f"{name}\n[not bold]{unit}", justify="right", no_wrap=True)
    for recipe in results.recipes:
        table.add_row(recipe, *(_cell(results, recipe, metric) for metric in shown))
    return table


def stdout_console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)


def _cell(results: Results, recipe: str, metric: str) -> str:
    line = results.find(recipe, metric)
    if line is None:
        return "reference" if recipe == REFERENCE else "–"
    _, _, digits, factor = COLUMNS[metric]
    error = line.printed_sem
    spread = "" if error is None else f" ± {error * factor:.{digits}f}"
    return f"{line.mean * factor:.{digits}f}{spread}"


def _print_line(step: Progress) -> None:
    if step.finished:
        cases = step.cases[0] if len(step.cases) == 1 else f"{step.cases[0]} to {step.cases[-1]}"
        how = "already there" if step.resumed else "done"
        line = f"{step.done}/{step.total} chunks: {step.recipe}, {cases}: {how}"
        print(line, file=sys.stderr, flush=True)
