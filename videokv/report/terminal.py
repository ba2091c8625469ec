"""What a study shows on the terminal: progress while it runs, a table at its end.

Progress goes to stderr, so that stdout holds the result alone. Where stderr is no terminal, one
plain line is printed for each finished unit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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
    """The summary: recipes down, metrics across; ± from eight cases up."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("recipe", no_wrap=True)
    shown = [m for m in COLUMNS if any(line.metric == m for line in results.summary)]
    for metric in shown:
        name, unit, _, _ = COLUMNS[metric]
        table.add_column(f"{name}\n[not bold]{unit}", justify="right", no_wrap=True)
    for recipe in results.recipes:
        table.add_row(recipe, *(_cell(results, recipe, metric) for metric in shown))
    stdout_console().print(table)


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
