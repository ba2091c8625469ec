"""Chunked prefill of a language model: does a compressed cache predict the text as well?

Documents are fed chunk by chunk, each from an empty cache; every finished chunk is compressed, the
current one is exact, and each token must be predicted from those before it (teacher forcing).
Paper: 2605.26266, appendix O.

    nll               mean of -log p of the next token, nats, from the second chunk on (the first
                      reads no cache); one row a chunk of a document, all of equal length, so that
                      the mean over rows is the mean over tokens of all documents
    nll_gap_recovered share of the gap between rtn-2bit and bf16 that a recipe closes: 0 is
                      rtn-2bit, 1 is bf16
    cached_mass       mean attention mass on earlier chunks, all layers, heads and queries
    bits_per_element, held_bytes, dense_bytes, ratio    counted at the end of each document
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from videokv.cache.memory import Memory
from videokv.outputs import check_folder
from videokv.recipes import recipe as find_recipe
from videokv.studies.journal import Journal
from videokv.studies.prefill_inputs import (
    DEFAULT_MODEL,
    LanguageModel,
    Text,
    fingerprint,
    load_language_model,
    read_texts,
    token_ids,
)
from videokv.studies.results import Results, Row, versions, write_json

if TYPE_CHECKING:
    from videokv.recipes import Recipe

STUDY = "prefill"
REFERENCE = "bf16"
BASELINE = "rtn-2bit"
DEFAULT_RECIPES = (
    "bf16",
    "rtn-2bit",
    "rtn-2bit+taylor",
    "rtn-2bit+calibrated",
    "quarot-2bit",
    "quarot-2bit+taylor",
    "quarot-2bit+calibrated",
)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PrefillStudy:
    """What to run. bf16 is always run, first: it is the reference.

    text: files or names of built-in documents; none: all built-in ones.
    tokens: how many of each document are fed, a multiple of ``chunk_tokens``; one more is read, the
    last target.
    """

    recipes: tuple[str, ...] = DEFAULT_RECIPES
    model: str = DEFAULT_MODEL
    text: tuple[str | Path, ...] = ()
    chunk_tokens: int = 512
    tokens: int = 3072
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk must be at least 1 token, got {self.chunk_tokens}")
        if self.tokens % self.chunk_tokens or self.tokens < 2 * self.chunk_tokens:
            raise ValueError(
                f"tokens must be a multiple of chunk and at least two chunks, got {self.tokens} "
                f"tokens in chunks of {self.chunk_tokens}"
            )
        if not self.recipes:
            raise ValueError("recipes must name at least one recipe, got none")
        for name in self.recipes:
            find_recipe(name)
        object.__setattr__(self, "recipes", tuple(dict.fromkeys((REFERENCE, *self.recipes))))


def run_prefill(
    study: PrefillStudy, out: Path, *, command: str, progress: Progress | None = None
) -> Results:
    """Run what is not in ``out`` yet, and write ``out/results.json``.

    command: the command line, for the record. progress: called with (recipe, chunks done, chunks).

    Raises:
        ValueError: wrong options, a text that is too short, a missing model or package.
        OSError: ``out`` cannot be written.
    """
    check_folder(out)
    texts = read_texts(study.text)
    language = load_language_model(study.model, device=torch.device(study.device))
    _check_context(language, study.tokens)
    ids = {text.name: token_ids(language, text, count=study.tokens + 1) for text in texts}
    settings = {
        "study": STUDY,
        "model": language.name,
        "token_ids": {name: fingerprint(found) for name, found in ids.items()},
        "chunk_tokens": study.chunk_tokens,
        "tokens": study.tokens,
        "device": language.device.type,
        "dtype": str(language.model.dtype),
    }
    rows: list[Row] = []
    with Journal(out, settings, check=_unit_rows) as journal:
        for name in study.recipes:
            for document in ids:
                unit = f"{document}/{name}"
                if unit not in journal.done:
                    found = prefill_rows(
                        language.model,
                        ids[document],
                        name,
                        document=document,
                        chunk_tokens=study.chunk_tokens,
                        progress=progress,
                    )
                    journal.append(unit, {"rows": [vars(row) for row in found]})
                rows += _unit_rows(journal.done[unit])
        rows += gap_rows(rows)
        results = Results(
            study=STUDY,
            command=command,
            seed=0,
            device=study.device,
            versions=_provenance(language, texts, settings),
            rows=tuple(rows),
            protocol="none",
        )
        write_json(out / "results.json", results.as_json())
    return results


def _unit_rows(unit: Mapping[str, Any]) -> list[Row]:
    return [Row(**row) for row in unit["rows"]]


@torch.inference_mode()
def prefill_rows(
    model: Any,
    ids: Tensor,
    recipe: str | Recipe,
    *,
    document: str,
    chunk_tokens: int,
    progress: Progress | None = None,
) -> list[Row]:
    """Feed ``ids[:, :-1]`` chunk by chunk under one recipe and measure.

    ids: int64 ``[1, N + 1]``, N a multiple of ``chunk_tokens``. document: its name in the rows.
    """
    from videokv.adapters.transformers.models import cache_keyword
    from videokv.transformers import CompressedCache

    count = (ids.shape[1] - 1) // chunk_tokens
    keyword = cache_keyword(model)
    name = recipe if isinstance(recipe, str) else recipe.name
    rows: list[Row] = []
    with CompressedCache(model, recipe, chunk=chunk_tokens, record_mass=True) as cache:
        for number in range(count):
            start = number * chunk_tokens
            window = ids[:, start : start + chunk_tokens + 1]
            began = time.perf_counter()
            logits = model(input_ids=window[:, :-1], use_cache=True, **{keyword: cache}).logits
            nll = negative_log_likelihood(logits, window[:, 1:])
            seconds = time.perf_counter() - began
            if number:
                case = case_name(document, number)
                rows.append(Row(case, name, "nll", nll))
                rows.append(Row(case, name, "seconds_per_chunk", seconds))
            if progress is not None:
                progress(f"{document} {name}", number + 1, count)
        cache.commit()
        rows += [
            Row(case_name(document, number), name, "cached_mass", mass)
            for number, mass in enumerate(cache.mass().steps, start=1)
        ]
        rows += memory_rows(document, name, cache.memory())
    return rows


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> float:
    """Mean of -log p(target), nats. logits ``[1, T, V]``, targets int64 ``[1, T]``."""
    losses = torch.nn.functional.cross_entropy(logits[0].float(), targets[0], reduction="none")
    return float(losses.double().mean())


def memory_rows(document: str, recipe: str, memory: Memory) -> list[Row]:
    """The counted bytes and bits at the end of a document."""
    names = ("bits_per_element", "held_bytes", "dense_bytes", "ratio")
    return [Row(document, recipe, name, getattr(memory, name)) for name in names]


def gap_rows(rows: Sequence[Row]) -> list[Row]:
    """``nll_gap_recovered`` of every recipe but the two that span the gap.

    The share is a ratio of sums over chunks, R = Σ(base - r) / Σ(base - ref). The row of a chunk is
    R plus that chunk's part in its linearisation, so that mean and standard error of the rows are
    those of the ratio estimator (a ratio chunk by chunk would blow up where the gap is small).
    No rows where a reference is missing or rtn-2bit is no worse than bf16.
    """
    nll = _by_recipe(rows, "nll")
    if REFERENCE not in nll or BASELINE not in nll:
        return []
    cases = list(nll[REFERENCE])
    base = np.array([nll[BASELINE][case] for case in cases])
    gap = base - np.array([nll[REFERENCE][case] for case in cases])
    if gap.mean() <= 0:
        return []
    found: list[Row] = []
    for name, values in nll.items():
        if name in (REFERENCE, BASELINE):
            continue
        closed = base - np.array([values[case] for case in cases])
        share = closed.mean() / gap.mean()
        parts = share + (closed - share * gap) / gap.mean()
        found += [
            Row(case, name, "nll_gap_recovered", float(part))
            for case, part in zip(cases, parts, strict=True)
        ]
    return found


def groups(cases: Sequence[str], chunk_tokens: int) -> dict[str, list[str]]:
    """Chunks by document, then by how many tokens stand before them, each where there are several.

    Lengths are binned by powers of two, half open, as in the paper's appendix O.3.
    """
    by_document: dict[str, list[str]] = {}
    by_length: dict[int, list[str]] = {}
    for case in cases:
        by_document.setdefault(case.rpartition("/")[0], []).append(case)
        before = chunk_number(case) * chunk_tokens
        by_length.setdefault(1 << (before.bit_length() - 1), []).append(case)
    lengths = {f"after {low} to {2 * low - 1}": by_length[low] for low in sorted(by_length)}
    return {
        name: found
        for part in (by_document, lengths)
        if len(part) > 1
        for name, found in part.items()
    }


def case_name(document: str, number: int) -> str:
    """The name of a chunk; the first of a document is 000."""
    return f"{document}/chunk-{number:03d}"


def chunk_number(case: str) -> int:
    """The number in ``case_name``."""
    return int(case.rpartition("chunk-")[2])


def _by_recipe(rows: Sequence[Row], metric: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.metric == metric:
            found.setdefault(row.recipe, {})[row.case] = row.value
    return found


def _check_context(language: LanguageModel, tokens: int) -> None:
    longest = language.context_tokens
    if longest is not None and tokens > longest:
        raise ValueError(
            f"{language.name} was made for at most {longest} tokens, got --tokens {tokens}"
        )


def _provenance(
    language: LanguageModel, texts: Sequence[Text], settings: Mapping[str, Any]
) -> dict[str, str]:
    import transformers

    return {
        **versions(),
        "transformers": transformers.__version__,
        "model": language.name,
        "dtype": settings["dtype"],
        "text": f"the first {settings['tokens']} tokens of "
        + " and of ".join(text.source for text in texts),
        "chunk_tokens": str(settings["chunk_tokens"]),
        "token_ids_sha256": ", ".join(settings["token_ids"].values()),
    }
