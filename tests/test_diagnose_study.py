"""The recorder on a small world model, and the study's files."""

import json
import time

import pytest
import studies_fakes
import torch

from videokv import cli
from videokv.recipes import recipe
from videokv.studies import diagnose as study
from videokv.studies import rollout as seam
from videokv.studies import rollouts
from videokv.studies.side_by_side import SideBySide
from videokv.studies.variants import variant
from videokv.worldmodel.config import WorldModelConfig
from videokv.worldmodel.model import WorldModel
from videokv.worldmodel.sampler import rollout

CONFIG = WorldModelConfig(
    height=24, width_px=32, chunk_frames=3, width=64, heads=1, blocks=2, window_chunks=3,
    sample_steps=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> WorldModel:
    made = WorldModel(CONFIG).initialize(seed=0).eval()
    g = torch.Generator().manual_seed(1)
    for module in (made.modulation, made.final_modulation, made.patch_out):
        module.weight.data = torch.randn(module.weight.shape, generator=g) * 0.1
    return made


def clips(count: int) -> seam.Clips:
    g = torch.Generator().manual_seed(2)
    frames = torch.randint(0, 256, (count, 36, 24, 32, 3), generator=g).to(torch.uint8)
    return seam.Clips(frames, torch.zeros(count, 36, dtype=torch.long), "fake")


def roll(model, cache, chunks=2):
    found = clips(1)
    return rollout(model, found.frames[:, :6], found.actions, cache, chunks=chunks,
                   autocast=torch.bfloat16)  # fmt: skip


def recorded(model, *names: str, layers=(0, 1), steps=(0, 2)):
    taps = []
    packed = {name: recipe(name).new_cache(window_chunks=3) for name in names}
    dense = recipe("bf16").new_cache(window_chunks=3)
    cache = SideBySide(dense, packed, layers=layers, steps=steps, on_attention=taps.append,
                       first_token=6 * CONFIG.frame_tokens)  # fmt: skip
    return roll(model, cache), taps


def test_the_rollout_is_the_dense_one_and_taps_are_where_they_were_asked_for(model) -> None:
    frames, taps = recorded(model, "rtn-2bit", layers=(1,), steps=(0, 2))
    assert torch.equal(frames, roll(model, recipe("bf16").new_cache(window_chunks=3)))
    tokens = 3 * CONFIG.frame_tokens
    places = [(t.start_token, t.layer, t.step) for t in taps]
    assert places == [
        (2 * tokens, 1, 0),
        (2 * tokens, 1, 2),
        (3 * tokens, 1, 0),
        (3 * tokens, 1, 2),
    ]
    assert [t.pasts["rtn-2bit"].tokens for t in taps] == [2 * tokens] * 2 + [3 * tokens] * 2


def test_a_dense_cache_beside_shows_no_difference_and_a_packed_one_does(model) -> None:
    _, taps = recorded(model, "bf16", "rtn-2bit", "rtn-2bit+taylor")
    for tap in taps:
        found = {name: d.means() for name, d in tap.diagnoses().items()}
        assert found["bf16"]["mass_shift"] == 0 and found["bf16"]["output_mse"] < 1e-12
        assert found["rtn-2bit"]["output_mse"] > 1e-6
        corrected = found["rtn-2bit+taylor"]
        assert corrected["cached_mass"] < found["rtn-2bit"]["cached_mass"]


def test_the_study_writes_rows_details_and_figures(model, monkeypatch, tmp_path, capsys) -> None:
    rollouts._model.cache_clear()
    rollouts._clips.cache_clear()
    monkeypatch.setattr(seam, "load_model", lambda device: model)
    monkeypatch.setattr(seam, "get_clips", lambda count, *, seed: clips(count))
    monkeypatch.setattr("videokv.report.figures.sets.WorldModelConfig", lambda: CONFIG)
    monkeypatch.chdir(tmp_path)
    options = ["diagnose", "--recipes", "rtn-2bit,quantwm-2bit", "--clips", "1", "--chunks", "1"]
    assert cli.main([*options, "--steps", "0,2", "--device", "cpu", "--out", "d", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    metrics = {row["metric"] for row in read["rows"]}
    assert {
        "mass_shift", "jsd_nats", "token_shift", "output_mse_relative", "key_mse", "value_mse",
        "output_mse_keys_only", "log_partition_error_nats", "effective_tokens", "bits_per_element",
    } <= metrics  # fmt: skip
    studies_fakes.check_schema(tmp_path / "d" / "results.json")
    details = json.loads((tmp_path / "d" / "diagnostics.json").read_text())
    assert len(details["by_layer_and_step"]["rtn-2bit"]["mass_shift"]) == 2
    assert details["query_energy"]["0"][0][-1] == pytest.approx(1)
    names = {p.name for p in (tmp_path / "d" / "figures").iterdir()}
    for name in ("attention_maps", "token_selection", "mass_shift", "jsd_nats", "output_mse",
                 "query_energy", "convexity"):  # fmt: skip
        assert {f"{name}.png", f"{name}.svg", f"{name}.json"} <= names
    rollouts._model.cache_clear()
    rollouts._clips.cache_clear()


@pytest.fixture
def small(model, monkeypatch):
    rollouts._model.cache_clear()
    rollouts._clips.cache_clear()
    monkeypatch.setattr(seam, "load_model", lambda device: model)
    monkeypatch.setattr(seam, "get_clips", lambda count, *, seed: clips(count))
    yield
    rollouts._model.cache_clear()
    rollouts._clips.cache_clear()


def small_plan(out, **changes) -> study.DiagnosePlan:
    names = ("quarot-2bit+taylor", "rtn-2bit-psac8+taylor")
    settings = {"clips": 3, "chunks": 1, "steps": (0, 2), "device": "cpu", **changes}
    return study.DiagnosePlan(tuple(variant(name) for name in names), out, **settings)


def test_a_batch_gives_the_figures_of_clips_run_alone(small, monkeypatch, tmp_path) -> None:
    alone = study.run_diagnose(small_plan(tmp_path / "1"))
    monkeypatch.setitem(study.BATCH_CLIPS, "cpu", 2)
    batched = study.run_diagnose(small_plan(tmp_path / "2"))
    assert [(r.case, r.recipe, r.metric) for r in batched.rows] == [
        (r.case, r.recipe, r.metric) for r in alone.rows
    ]
    for ours, theirs in zip(batched.rows, alone.rows, strict=True):
        # bfloat16 products of another batch size, carried through a rollout
        assert ours.value == pytest.approx(theirs.value, rel=0.1, abs=0.01), ours
    maps = [json.loads((tmp_path / n / "diagnostics.json").read_text())["example"]["maps"]
            for n in "12"]  # fmt: skip
    assert torch.allclose(*(torch.tensor(m["quarot-2bit+taylor"]) for m in maps), atol=1e-3)


def test_nothing_is_begun_after_the_deadline_and_the_plan_goes_on(
    small, monkeypatch, tmp_path
) -> None:
    found = study.run_diagnose(small_plan(tmp_path / "d"), deadline=time.monotonic() - 1)
    assert not found.rows and not (tmp_path / "d" / "diagnostics.json").exists()
    seen: list[str] = []
    asked = iter([False, True])
    with monkeypatch.context() as patch:
        patch.setattr(study, "is_over", lambda deadline: next(asked))
        study.run_diagnose(small_plan(tmp_path / "d"), on_unit=lambda key, *_: seen.append(key))
    assert seen == ["clip-000"]
    assert len({row.case for row in study.run_diagnose(small_plan(tmp_path / "d")).rows}) == 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": ()}, "steps must name"),
        ({"layers": ()}, "layers must name"),
        ({"variants": (variant("bf16"),)}, "at least one"),
        ({"chunks": 0}, "chunks 1 to"),
    ],
)
def test_wrong_plans_are_refused(tmp_path, changes, says) -> None:
    with pytest.raises(ValueError, match=says):
        study.DiagnosePlan(**{"variants": (variant("rtn-2bit"),), "out": tmp_path, **changes})
