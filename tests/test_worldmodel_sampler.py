"""Rollouts, clips, evaluation and commands of the world model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from videokv.worldmodel.cli import app
from videokv.worldmodel.clips import (
    Clips,
    changes_view,
    clips_from_split,
    load_clips,
    psnr_db,
    repeat_psnr_db,
    save_clips,
)
from videokv.worldmodel.config import WorldModelConfig
from videokv.worldmodel.data import SplitData
from videokv.worldmodel.evaluate import evaluate, gradient_magnitude, print_table, save_sheet
from videokv.worldmodel.model import WorldModel
from videokv.worldmodel.plain import PlainCache
from videokv.worldmodel.sampler import chunk_noise, rollout, time_steps, to_uint8
from videokv.worldmodel.weights import save_weights

TINY = WorldModelConfig(width=24, heads=2, blocks=2, window_chunks=2, mlp_ratio=2)


def tiny_model() -> WorldModel:
    model = WorldModel(TINY).initialize(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.eval()


def cache() -> PlainCache:
    return PlainCache(layers=TINY.blocks, window_chunks=TINY.window_chunks)


def clips(count: int = 3) -> Clips:
    generator = torch.Generator().manual_seed(2)
    frames = torch.randint(0, 256, (count, 36, 72, 96, 3), generator=generator)
    actions = torch.randint(0, 6, (count, 36), generator=generator)
    return Clips(frames.to(torch.uint8), actions.to(torch.uint8), "noise")


def test_time_steps_fall_from_one_to_zero_and_shift_to_noise() -> None:
    plain = time_steps(steps=8, shift=1.0)
    shifted = time_steps(steps=8, shift=2.2)
    assert plain == [1 - i / 8 for i in range(9)]
    assert shifted[0] == 1 and shifted[-1] == 0
    assert all(a > b for a, b in zip(shifted, shifted[1:], strict=False))
    assert all(a > b for a, b in zip(shifted[1:-1], plain[1:-1], strict=True))
    with pytest.raises(ValueError, match="positive"):
        time_steps(steps=0, shift=1.0)


def test_noise_depends_on_seed_clip_and_chunk_alone() -> None:
    one = chunk_noise(TINY, seed=1, clips=[4, 9], chunk=3)
    assert torch.equal(one[1:], chunk_noise(TINY, seed=1, clips=[9], chunk=3))
    for other in ({"seed": 2, "chunk": 3}, {"seed": 1, "chunk": 2}):
        assert not torch.equal(one[1:], chunk_noise(TINY, clips=[9], **other))
    assert abs(float(one.mean())) < 0.02 and abs(float(one.std()) - 1) < 0.02


def test_rollout_does_not_depend_on_the_batch_or_touch_the_global_generator() -> None:
    model, real = tiny_model(), clips()
    state = torch.random.get_rng_state()
    seen = []
    whole = rollout(
        model,
        real.frames[:, :6],
        real.actions,
        cache(),
        chunks=3,
        steps=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert torch.equal(state, torch.random.get_rng_state())
    assert whole.shape == (3, 9, 72, 96, 3) and whole.dtype == torch.uint8
    assert seen == [(1, 3), (2, 3), (3, 3)]
    alone = rollout(
        model, real.frames[2:, :6], real.actions[2:], cache(), chunks=3, steps=2, clips=[2]
    )
    assert float((alone[0].float() - whole[2].float()).abs().max()) <= 1


def test_rollout_is_the_written_out_sampler() -> None:
    """Two Euler steps by hand for the first chunk, with float64 as a check on the update."""
    model, real = tiny_model(), clips(1)
    made = rollout(model, real.frames[:, :6], real.actions, cache(), chunks=1, steps=2, shift=1.0)
    hand = cache()
    pixels, actions = real.frames[:, :6].float() / 127.5 - 1, real.actions.long()
    with torch.no_grad():
        for start in (0, 3):
            rows = slice(start, start + 3)
            model(
                pixels[:, rows],
                torch.zeros(1),
                actions[:, rows],
                start_frame=start,
                cache=hand,
                write=True,
            )
            hand.commit((start + 3) * TINY.frame_tokens)
        z = chunk_noise(TINY, seed=0, clips=[0], chunk=2)
        for t, after in ((1.0, 0.5), (0.5, 0.0)):
            times = torch.full((1,), t)
            x = model(z, times, actions[:, 6:9], start_frame=6, cache=hand)
            z = z + (after - t) * (z - x) / t
    assert float((to_uint8(z).float() - made.float()).abs().max()) <= 1


@pytest.mark.parametrize(
    ("frames", "steps", "chunks", "word"),
    [(6, 11, 2, "more actions"), (5, 36, 2, "whole chunks"), (6, 36, 0, "chunks must")],
)
def test_bad_rollouts_are_refused(frames: int, steps: int, chunks: int, word: str) -> None:
    real = clips(1)
    with pytest.raises(ValueError, match=word):
        rollout(
            tiny_model(), real.frames[:, :frames], real.actions[:, :steps], cache(), chunks=chunks
        )


@pytest.mark.parametrize("seed", [-1, 0.5, True])
def test_bad_seeds_are_refused(seed: object) -> None:
    real = clips(1)
    with pytest.raises(ValueError, match="seed must be an integer of at least 0"):
        rollout(tiny_model(), real.frames[:, :6], real.actions, cache(), chunks=1, seed=seed)


def test_unknown_actions_and_float_contexts_are_refused() -> None:
    real = clips(1)
    with pytest.raises(ValueError, match="0..5"):
        rollout(tiny_model(), real.frames[:, :6], real.actions + 6, cache(), chunks=1)
    with pytest.raises(ValueError, match="uint8"):
        rollout(tiny_model(), real.frames[:, :6].float(), real.actions, cache(), chunks=1)


def test_psnr_and_gradients_against_numpy() -> None:
    frames = clips(1).frames[0, :2]
    a, b = frames.numpy().astype(float)
    expected = 10 * np.log10(255**2 / ((a - b) ** 2).mean())
    assert float(psnr_db(frames[0], frames[1])) == pytest.approx(expected)
    assert float(psnr_db(frames[0], frames[0])) == pytest.approx(100)
    luma = a @ np.array([0.299, 0.587, 0.114])
    down, across = np.diff(luma, axis=0)[:, :-1], np.diff(luma, axis=1)[:-1]
    assert float(gradient_magnitude(frames[0])) == pytest.approx(np.hypot(down, across).mean())


def test_clips_survive_their_files_and_damage_is_refused(tmp_path: Path) -> None:
    from videokv.worldmodel.clips import _read_clips

    real = clips(2)
    real.frames[:, 1:, :, :] = 7  # noise is slow to compress
    save_clips(tmp_path, real)
    back = _read_clips(tmp_path)
    assert torch.equal(back.frames, real.frames) and torch.equal(back.actions, real.actions)
    (tmp_path / "01.webp").write_bytes(b"no image")
    with pytest.raises(ValueError, match="damaged"):
        _read_clips(tmp_path)


def test_shipped_clips_change_their_view_and_are_small() -> None:
    real = load_clips()
    assert real.frames.shape == (8, 36, 72, 96, 3)
    assert bool(changes_view(real.frames).all())
    assert float(repeat_psnr_db(real.frames)[:, :3].mean(1).max()) < 18
    folder = Path(str(__import__("videokv.worldmodel", fromlist=["x"]).__file__)).parent / "clips"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2_500_000
    assert len(load_clips(3)) == 3
    with pytest.raises(ValueError, match="1..8"):
        load_clips(9)


def test_clips_of_a_split_are_where_the_view_changes() -> None:
    real = clips(3)
    still = real.frames.numpy().copy()
    still[0] = still[0, :1]  # a walk that stands still
    split = SplitData(still, real.actions.numpy(), np.arange(3))
    picked = clips_from_split(split, 2)
    assert torch.equal(picked.frames, torch.from_numpy(still[1:]))
    with pytest.raises(ValueError, match="expected 3 clips, found 2"):
        clips_from_split(split, 3)


def test_evaluation_rows_summary_table_and_sheet(tmp_path: Path) -> None:
    real = clips(3)
    result = evaluate(tiny_model(), real, chunks=2, steps=2, batch=2)
    assert len(result.rows) == 6 and result.generated.shape == (3, 6, 72, 96, 3)
    row = result.rows[3]
    assert (row["clip"], row["chunk"], row["view_changes"]) == (1, 2, True)
    expected = psnr_db(result.generated[1, 3:6], real.frames[1, 9:12]).mean()
    assert row["psnr_db"] == pytest.approx(float(expected))
    assert 0.3 < row["cached_mass"] < 0.95
    entry = next(e for e in result.summary if e["metric"] == "psnr_db" and e["chunk"] == 1)
    values = [r["psnr_db"] for r in result.rows if r["chunk"] == 1]
    assert entry["mean"] == pytest.approx(np.mean(values)) and entry["n"] == 3
    assert entry["sem"] == pytest.approx(np.std(values, ddof=1) / 3**0.5)
    content = json.loads(result.to_json())
    assert {t["name"] for t in content["targets"]} >= {"cached attention mass"}
    text = io.StringIO()
    print_table(result, out=text)
    assert "noise" in text.getvalue() and "target" in text.getvalue()
    save_sheet(tmp_path / "sheet.png", real, result.generated)
    assert (tmp_path / "sheet.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="need clips of"):
        evaluate(tiny_model(), real, chunks=11)


def test_the_commands_work_and_refuse(tmp_path: Path) -> None:
    run = CliRunner().invoke
    path = save_weights(tmp_path / "w.safetensors", tiny_model().state_dict(), TINY)
    common = ["--weights", str(path), "--clips", "1", "--chunks", "1", "--device", "cpu"]
    result = run(app, ["evaluate", *common, "--steps", "1", "--out", str(tmp_path / "e.json")])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "e.json").read_text())["clips"] == "1 shipped clips"
    result = run(app, ["sample", *common, "--steps", "1", "--out", str(tmp_path / "video")])
    assert result.exit_code == 0 and (tmp_path / "video" / "00.webp").exists()
    assert run(app, ["evaluate", "--weights", str(tmp_path / "none")]).exit_code == 2
    assert run(app, ["sample", *common, "--out", "x", "--device", "tpu"]).exit_code == 2
    empty = ["train", "--data", str(tmp_path), "--out", str(tmp_path / "run"), "--steps", "1"]
    assert run(app, empty).exit_code == 2
