"""The prefill study on a tiny random model with a tokenizer of letters."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers", minversion="4.56")

from test_transformers_cache import tiny_llama  # noqa: E402

from videokv.studies import prefill as prefill_study  # noqa: E402
from videokv.studies import prefill_cli  # noqa: E402
from videokv.studies.prefill import (  # noqa: E402
    PrefillStudy,
    gap_rows,
    groups,
    negative_log_likelihood,
    prefill_rows,
    run_prefill,
)
from videokv.studies.prefill_inputs import (  # noqa: E402
    LanguageModel,
    Text,
    fingerprint,
    load_language_model,
    python_reference,
    python_source,
    read_texts,
    token_ids,
)
from videokv.studies.results import Row, mean_sem_n  # noqa: E402

RECIPES = ("rtn-2bit", "rtn-2bit+calibrated")


def letters(text: str) -> dict[str, list[int]]:
    """A tokenizer: one token a character."""
    return {"input_ids": [ord(c) % 97 for c in text]}


@pytest.fixture(scope="module")
def language():
    model = tiny_llama(max_position_embeddings=512)
    return LanguageModel("tiny.gguf", model, letters)


@pytest.fixture
def study(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 9)
    return PrefillStudy(recipes=RECIPES, text=(text,), chunk_tokens=32, tokens=128)


@pytest.fixture
def loaded(monkeypatch, language):
    monkeypatch.setattr(prefill_study, "load_language_model", lambda *a, **k: language)


def values(rows, recipe, metric):
    return {r.case: r.value for r in rows if (r.recipe, r.metric) == (recipe, metric)}


def test_bf16_nll_is_that_of_the_full_prompt(language):
    ids = token_ids(language, python_reference(), count=97)
    rows = prefill_rows(language.model, ids, "bf16", document="doc", chunk_tokens=32)
    with torch.inference_mode():
        log_p = language.model(ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
    losses = -log_p.gather(1, ids[0, 1:, None])[:, 0]
    found = values(rows, "bf16", "nll")
    assert list(found) == ["doc/chunk-001", "doc/chunk-002"]
    for case, expected in zip(found, losses.split(32)[1:], strict=True):
        assert found[case] == pytest.approx(float(expected.mean()), rel=1e-5)
    assert values(rows, "bf16", "ratio") == {"doc": 1.0}
    assert all(0 < m < 1 for m in values(rows, "bf16", "cached_mass").values())


def test_nll_is_the_mean_over_tokens():
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, 0.0]]])
    expected = (math.log(4 / 3) + math.log(2)) / 2
    found = negative_log_likelihood(logits, torch.tensor([[1, 0]]))
    assert found == pytest.approx(expected, rel=1e-6)


def test_study_writes_results_and_resumes(loaded, study, tmp_path, monkeypatch):
    out = tmp_path / "out"
    lines = []
    results = run_prefill(study, out, command="prefill", progress=lambda *a: lines.append(a))
    assert lines[:2] == [("text bf16", 1, 4), ("text bf16", 2, 4)] and len(lines) == 12
    written = json.loads((out / "results.json").read_text())
    assert written == json.loads(json.dumps(results.as_json()))
    assert list(written) == [
        "study",
        "command",
        "seed",
        "device",
        "versions",
        "protocol",
        "not_available",
        "rows",
        "summary",
    ]
    assert "the first 128 tokens of text.txt" in written["versions"]["text"]
    metrics = {row["metric"] for row in written["rows"]}
    expected = {"nll", "cached_mass", "bits_per_element", "held_bytes", "dense_bytes", "ratio"}
    assert expected | {"seconds_per_chunk"} == metrics - {"nll_gap_recovered"}
    bits = {s["recipe"]: s["mean"] for s in written["summary"] if s["metric"] == "bits_per_element"}
    assert bits["bf16"] == 32  # the width of this model's cache
    assert 2 < bits["rtn-2bit"] == bits["rtn-2bit+calibrated"] < 3

    monkeypatch.setattr(prefill_study, "prefill_rows", lambda *a, **k: pytest.fail("run again"))
    again = run_prefill(study, out, command="prefill")
    assert again.rows == results.rows


def test_another_text_into_the_same_folder_is_refused(loaded, study, tmp_path):
    run_prefill(study, tmp_path / "out", command="prefill")
    study.text[0].write_text("something else entirely " * 40)
    with pytest.raises(ValueError, match="begun with other settings"):
        run_prefill(study, tmp_path / "out", command="prefill")


def test_gap_share_has_the_mean_of_the_ratio():
    nll = {"bf16": (2.0, 2.5, 3.0), "rtn-2bit": (3.0, 3.0, 3.1), "x": (2.5, 2.9, 3.0)}
    rows = [
        Row(f"chunk-{i}", name, "nll", value)
        for name, found in nll.items()
        for i, value in enumerate(found)
    ]
    mean, sem, n = mean_sem_n([row.value for row in gap_rows(rows)])
    assert (mean, n) == (pytest.approx(0.7 / 1.6), 3)
    jackknife = [
        sum(nll["rtn-2bit"][j] - nll["x"][j] for j in range(3) if j != i)
        / sum(nll["rtn-2bit"][j] - nll["bf16"][j] for j in range(3) if j != i)
        for i in range(3)
    ]
    spread = math.sqrt(2 / 3 * sum((j - sum(jackknife) / 3) ** 2 for j in jackknife))
    assert sem == pytest.approx(spread, rel=0.5)


def test_chunks_are_grouped_by_document_and_by_length():
    cases = [f"{document}/chunk-{number:03d}" for document in "ab" for number in (1, 2, 3, 4)]
    found = groups(cases, 512)
    assert {name: len(each) for name, each in found.items()} == {
        "a": 4, "b": 4, "after 512 to 1023": 2, "after 1024 to 2047": 4, "after 2048 to 4095": 2,
    }  # fmt: skip
    assert found["after 1024 to 2047"] == [cases[1], cases[2], cases[5], cases[6]]
    assert groups(cases[:1], 512) == {}  # nothing to tell apart


def test_no_share_of_a_gap_that_is_not_there():
    rows = [Row("c", name, "nll", 2.0) for name in ("bf16", "rtn-2bit", "x")]
    assert gap_rows(rows) == []
    assert gap_rows(rows[:1] + rows[2:]) == []


# -- inputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("built_in", [python_reference, python_source])
def test_built_in_documents_are_long_and_always_the_same(built_in):
    text = built_in()
    assert len(text.content) > 100_000
    assert text == built_in()
    assert "of Python" in text.source


def test_documents_are_read_in_order(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).write_text(name * 3)
    found = read_texts([tmp_path / "b", tmp_path / "a", "python-source"])
    assert found == (Text("b", "b", "bbb"), Text("a", "a", "aaa"), python_source())
    assert read_texts([]) == (python_reference(), python_source())
    with pytest.raises(ValueError, match="--text"):
        read_texts([tmp_path / "missing"])
    with pytest.raises(ValueError, match="different file names"):
        read_texts([tmp_path / "a", tmp_path / "a"])


def test_each_document_is_read_from_an_empty_cache(loaded, study, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("pack my box with five dozen liquor jugs " * 9)
    alone = run_prefill(study, tmp_path / "alone", command="prefill")
    both = dataclasses.replace(study, text=(other, *study.text))
    pooled = run_prefill(both, tmp_path / "both", command="prefill")
    nll = values(pooled.rows, "rtn-2bit", "nll")
    assert list(nll) == [f"{name}/chunk-00{i}" for name in ("other", "text") for i in (1, 2, 3)]
    for case, value in values(alone.rows, "rtn-2bit", "nll").items():
        assert nll[case] == value


def test_short_texts_are_refused(language):
    with pytest.raises(ValueError, match="needs 50 tokens, book has 3"):
        token_ids(language, Text("book", "shelf", "abc"), count=50)


def test_fingerprint_tells_texts_apart():
    one = torch.arange(9)[None]
    assert fingerprint(one) == fingerprint(one.clone()) != fingerprint(one + 1)


def test_missing_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing is downloaded"):
        load_language_model(str(tmp_path / "none.gguf"), device=torch.device("cpu"))


def test_a_checkpoint_folder_is_loaded(tmp_path, language):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    language.model.save_pretrained(tmp_path)
    loaded = load_language_model(str(tmp_path), device=torch.device("cpu"))
    assert token_ids(loaded, Text("", "", "a b b a"), count=3).tolist() == [[0, 1, 1]]
    assert loaded.context_tokens == 512


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk_tokens": 0}, "at least 1 token"),
        ({"chunk_tokens": 100, "tokens": 250}, "multiple of chunk"),
        ({"chunk_tokens": 100, "tokens": 100}, "at least two chunks"),
        ({"recipes": ()}, "at least one recipe"),
        ({"recipes": ("rtm-2bit",)}, "rtm-2bit"),
    ],
)
def test_wrong_studies_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        PrefillStudy(**options)


def test_texts_longer_than_the_context_are_refused(loaded, study, tmp_path):
    longer = PrefillStudy(recipes=("bf16",), text=study.text, chunk_tokens=512, tokens=1024)
    with pytest.raises(ValueError, match="at most 512 tokens"):
        run_prefill(longer, tmp_path / "out", command="prefill")


# -- the command -----------------------------------------------------------------------------


def invoke(study: PrefillStudy, out: Path, *options: str):
    app = typer.Typer()
    app.command()(prefill_cli.prefill)
    arguments = ["--text", str(study.text[0]), "--chunk", "32", "--tokens", "128"]
    arguments += ["--recipes", ",".join(RECIPES), "--device", "cpu", "--out", str(out)]
    return CliRunner().invoke(app, [*arguments, *options])


def test_command_prints_a_table(loaded, study, tmp_path):
    found = invoke(study, tmp_path / "out")
    assert found.exit_code == 0, found.output
    for word in ("bf16", "rtn-2bit", "gap", "text.txt", "3 chunks after the first"):
        assert word in found.output
    assert "after 32" in found.output and "after 64" in found.output


def test_several_chunk_sizes_are_several_studies(loaded, study, tmp_path):
    found = invoke(study, tmp_path / "out", "--chunk", "64,32", "--json")
    assert [one["versions"]["chunk_tokens"] for one in json.loads(found.stdout)] == ["64", "32"]
    for size in (32, 64):
        assert (tmp_path / "out" / f"chunk-{size}" / "results.json").is_file()
    found = invoke(study, tmp_path / "out", "--chunk", "64,x")
    assert isinstance(found.exception, ValueError) and "--chunk" in str(found.exception)


def test_command_prints_json(loaded, study, tmp_path):
    found = invoke(study, tmp_path / "out", "--json")
    assert json.loads(found.stdout)["study"] == "prefill"


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:99"])
def test_command_refuses_unknown_devices(loaded, study, tmp_path, device):
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("there is a CUDA GPU here")
    found = invoke(study, tmp_path / "out", "--device", device)
    assert isinstance(found.exception, ValueError) and device in str(found.exception)
