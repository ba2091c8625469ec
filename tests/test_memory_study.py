"""Bytes of real models from counted bits; the longest rollout within a budget."""

import json

import pytest
import studies_fakes

from videokv import cli
from videokv.studies import memory


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


def test_the_command(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["memory", "--models", "self-forcing", "--recipes", "bf16,rtn-2bit", "--out", "m"]
    assert cli.main(options) == 0
    assert "self-forcing 720p" in capsys.readouterr().out
    studies_fakes.check_schema(tmp_path / "m" / "results.json")
    assert (tmp_path / "m" / "figures" / "memory.png").is_file()
    assert cli.main([*options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["protocol"] == "none"
    assert cli.main(["memory", "--models", "sora"]) == 2
    assert "longcat-video" in capsys.readouterr().err
    assert cli.main([*options, "--budget-gib", "0"]) == 2
