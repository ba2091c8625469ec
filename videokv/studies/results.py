"""Rows of a study in long form, their summary, and results.json.

A row is one case, one recipe, one metric. Everything that is written is finite: a value that is
not is refused here, so that no NaN or Infinity reaches a JSON file.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import videokv

MIN_CASES_FOR_PRINTED_ERROR = 8


@dataclass(frozen=True)
class Row:
    """One figure. case: what was run, e.g. ``"clip-003"``."""

    case: str
    recipe: str
    metric: str
    value: float

    def __post_init__(self) -> None:
        if not isinstance(self.value, (int, float)) or not math.isfinite(self.value):
            raise ValueError(
                f"{self.metric} of {self.recipe} in {self.case} must be a finite number, got "
                f"{self.value!r}"
            )


@dataclass(frozen=True)
class Summary:
    """Mean over cases; sem: standard error of that mean, None below two cases; n: cases."""

    recipe: str
    metric: str
    mean: float
    sem: float | None
    n: int

    @property
    def printed_sem(self) -> float | None:
        """The standard error where enough cases stand behind it to be shown to a reader."""
        return self.sem if self.n >= MIN_CASES_FOR_PRINTED_ERROR else None


@dataclass(frozen=True)
class Results:
    """A finished study, in the shape of results.json (results.schema.json describes it).

    protocol: which frames the quality metrics saw, by the names of ``videokv.metrics``; "none"
    where the study compares no frames.
    not_available: metric that was asked for → why it could not be had.
    """

    study: str
    command: str
    seed: int
    device: str
    versions: Mapping[str, str]
    rows: tuple[Row, ...]
    protocol: str = "all"
    not_available: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> tuple[Summary, ...]:
        return summarize(self.rows)

    @property
    def recipes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.recipe for row in self.rows))

    def find(self, recipe: str, metric: str) -> Summary | None:
        """The summary of one recipe and metric, None where no case has it."""
        chosen = [r for r in self.rows if r.recipe == recipe and r.metric == metric]
        return summarize(chosen)[0] if chosen else None

    def as_json(self) -> dict[str, Any]:
        return {
            "study": self.study,
            "command": self.command,
            "seed": self.seed,
            "device": self.device,
            "versions": dict(self.versions),
            "protocol": self.protocol,
            "not_available": dict(self.not_available),
            "rows": [asdict(row) for row in self.rows],
            "summary": [asdict(line) for line in self.summary],
        }


def read_results(path: Path) -> Results:
    """What ``results.json`` holds; ValueError where the file is not the results of a study."""
    try:
        read = json.loads(path.read_text())
        return Results(
            read["study"], read["command"], read["seed"], read["device"], read["versions"],
            tuple(Row(**row) for row in read["rows"]), read["protocol"],
            read.get("not_available", {}),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the results of a study: {error!r}") from error


def summarize(rows: Iterable[Row]) -> tuple[Summary, ...]:
    """One line per recipe and metric, in the order of first appearance."""
    values: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        values.setdefault((row.recipe, row.metric), []).append(row.value)
    lines = []
    for (recipe, metric), found in values.items():
        mean, sem, n = mean_sem_n(found)
        lines.append(Summary(recipe, metric, mean, sem, n))
    return tuple(lines)


def mean_sem_n(values: Sequence[float]) -> tuple[float, float | None, int]:
    """Mean, standard error of the mean (sample deviation; None below two values), count."""
    if not values:
        raise ValueError("a mean needs at least one value, got none")
    n = len(values)
    sem = float(np.std(values, ddof=1) / math.sqrt(n)) if n >= 2 else None
    return float(np.mean(values)), sem, n


def paired_difference(
    rows: Iterable[Row], *, metric: str, recipe: str, reference: str
) -> tuple[float, ...]:
    """``metric`` of ``recipe`` minus that of ``reference``, case by case, where both were run.

    Paired cases share clip and noise, so their differences vary less than the figures themselves.
    """
    by_recipe: dict[str, dict[str, float]] = {recipe: {}, reference: {}}
    for row in rows:
        if row.metric == metric and row.recipe in by_recipe:
            by_recipe[row.recipe][row.case] = row.value
    ours, theirs = by_recipe[recipe], by_recipe[reference]
    return tuple(value - theirs[case] for case, value in ours.items() if case in theirs)


def versions() -> dict[str, str]:
    """What the figures were made with."""
    return {
        "videokv": videokv.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def write_json(path: Path, value: object) -> None:
    """Write JSON whole or not at all: to a temporary file beside ``path``, then renamed."""
    write_bytes(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; on failure nothing is left behind (OSError passes on).

    Its folder is made where it is not there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner reads
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
