"""Training: it learns, decays, resumes, refuses; weights are checked on the way in and out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from videokv.worldmodel.config import MIRRORED_ACTION, WorldModelConfig
from videokv.worldmodel.data import SplitData
from videokv.worldmodel.model import WorldModel, teacher_forcing_mask
from videokv.worldmodel.training import (
    TrainingOptions,
    _new_run,
    _Windows,
    learning_rate,
    train,
    training_loss,
)
from videokv.worldmodel.weights import load_weights, save_weights

TINY = WorldModelConfig(height=16, width_px=24, width=48, heads=2, blocks=2, clip_chunks=4)

pytestmark = pytest.mark.filterwarnings("ignore:training on cpu")


def moving_bars(episodes: int = 6, frames: int = 20) -> SplitData:
    """Bars that an action moves left or right: something a tiny model can learn."""
    rng = np.random.default_rng(0)
    actions = rng.integers(1, 3, (episodes, frames)).astype(np.uint8)
    shift = np.cumsum(np.where(actions == 1, 4, -4), 1)
    columns = (np.arange(24) + shift[..., None]) % 24
    line = np.where(columns < 12, 230, 30).astype(np.uint8)
    video = np.broadcast_to(line[:, :, None, :, None], (episodes, frames, 16, 24, 3)).copy()
    return SplitData(video, actions, np.arange(episodes))


def options(**changes: object) -> TrainingOptions:
    base = {"steps": 30, "batch": 4, "peak_learning_rate": 2e-3, "warmup_steps": 5}
    return TrainingOptions(**{**base, **changes})


def losses(folder: Path) -> list[float]:
    lines = (folder / "train.log").read_text().splitlines()
    return [float(line.split("loss")[1].split()[0]) for line in lines if "loss" in line]


def test_training_lowers_the_loss_and_writes_loadable_weights(tmp_path: Path) -> None:
    lines: list[str] = []
    path = train(
        moving_bars(),
        tmp_path,
        options=options(steps=60, log_seconds=1e-6, ema=0.9),
        config=TINY,
        device="cpu",
        log=lines.append,
    )
    values = losses(tmp_path)
    assert len(values) == 60
    assert sum(values[-5:]) < 0.6 * sum(values[:5])
    assert any("ms/step" in line for line in lines)
    model = load_weights(path)
    assert model.config == TINY and not model.training


def test_a_run_resumes_where_it_stopped(tmp_path: Path) -> None:
    quiet = {"config": TINY, "device": "cpu", "log": lambda line: None}
    whole = train(moving_bars(), tmp_path / "a", options=options(steps=6), **quiet)
    first = options(steps=6, checkpoint_seconds=1e-6)
    with pytest.raises(KeyboardInterrupt):
        train(moving_bars(), tmp_path / "b", options=first, **{**quiet, "log": _stop_after(4)})
    assert (tmp_path / "b" / "checkpoint.pt").exists()
    again = train(moving_bars(), tmp_path / "b", options=options(steps=6), **quiet)
    for a, b in zip(
        load_weights(whole).parameters(), load_weights(again).parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)
    log = (tmp_path / "b" / "train.log").read_text()
    assert "from step 0" in log and "from step 2" in log


def _stop_after(lines: int):  # noqa: ANN202
    seen = []

    def log(line: str) -> None:
        seen.append(line)
        if len(seen) == lines:
            raise KeyboardInterrupt

    return log


def test_a_checkpoint_of_another_model_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    quiet = {"device": "cpu", "log": lambda line: None}
    train(moving_bars(), tmp_path, options=options(steps=1), config=TINY, **quiet)
    other = WorldModelConfig(
        height=16, width_px=24, width=48, heads=2, blocks=2, clip_chunks=4, rope_theta=50.0
    )
    with pytest.raises(ValueError, match="another folder"):
        train(moving_bars(), tmp_path, options=options(steps=2), config=other, **quiet)
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        train(moving_bars(), tmp_path, options=options(steps=2), config=TINY, **quiet)


def test_a_time_budget_ends_the_run(tmp_path: Path) -> None:
    budget = TrainingOptions(minutes=0.02, batch=2)
    train(moving_bars(), tmp_path, options=budget, config=TINY, device="cpu", log=lambda line: None)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["step"] >= 1 and state["seconds"] >= 60 * budget.minutes


def test_the_average_follows_the_weights_without_a_graph() -> None:
    run = _new_run(TINY, options(), torch.device("cpu"))
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(1.0)
    before = [value.clone() for value in run.average]
    run.step = 8  # decay min(0.9, 9 / 18)
    run.update_average(0.9)
    for value, old in zip(run.average, before, strict=True):
        torch.testing.assert_close(value, old + 0.5)
        assert not value.requires_grad


def test_the_rate_warms_up_and_decays_to_zero() -> None:
    spec = options(warmup_steps=10)
    assert learning_rate(spec, step=0, elapsed=0.0) == pytest.approx(2e-4)
    assert learning_rate(spec, step=50, elapsed=0.5) == pytest.approx(1e-3)
    assert learning_rate(spec, step=99, elapsed=1.0) == 0.0


@pytest.mark.parametrize(
    "change",
    [{"steps": None}, {"minutes": 1.0}, {"batch": 0}, {"ema": 1.5}, {"flip": -0.1}, {"seed": -1}],
)
def test_bad_options_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match="got|must not"):
        options(**change)


def test_windows_are_windows_and_flips_swap_the_turns() -> None:
    split, device = moving_bars(), torch.device("cpu")
    windows = _Windows(split, TINY, device)
    plain = windows.draw(options(), torch.Generator().manual_seed(1))
    assert plain.frames.shape == (4, 12, 16, 24, 3)
    found = any(
        np.array_equal(split.frames[e, s : s + 12], plain.frames[0].numpy())
        and np.array_equal(split.actions[e, s : s + 12], plain.actions[0].numpy())
        for e in range(6)
        for s in range(9)
    )
    assert found
    flipped = windows.draw(options(flip=1.0), torch.Generator().manual_seed(1))
    assert torch.equal(flipped.frames, plain.frames.flip(3))
    mirror = torch.tensor(MIRRORED_ACTION)
    assert torch.equal(flipped.actions, mirror[plain.actions])
    assert torch.equal(mirror[mirror], torch.arange(6))


def test_short_walks_are_refused() -> None:
    with pytest.raises(ValueError, match="12 or more frames"):
        _Windows(moving_bars(frames=11), TINY, torch.device("cpu"))


def test_the_loss_is_the_formula() -> None:
    """Zero output weights predict 0: the loss is |x|² / max(t, 0.2)² averaged."""
    model = WorldModel(TINY).initialize(seed=0)
    windows = _Windows(moving_bars(), TINY, torch.device("cpu"))
    batch = windows.draw(options(), torch.Generator().manual_seed(0))
    mask = teacher_forcing_mask(TINY, "cpu")
    loss = training_loss(model, *batch.tensors(), mask)
    target = batch.frames[:, 6:].double() / 127.5 - 1
    t = batch.noisy_t.double().repeat_interleave(3, 1)
    expected = (target.square().mean((2, 3, 4)) / t.clamp_min(0.2) ** 2).mean()
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)


def test_weights_round_trip_and_damage_is_refused(tmp_path: Path) -> None:
    model = WorldModel(TINY).initialize(seed=2)
    path = save_weights(tmp_path / "w.safetensors", model.state_dict(), TINY)
    for name, value in load_weights(path).state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], atol=1e-3, rtol=1e-3)
        assert value.dtype == torch.float32
    whole = path.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-100])
    (tmp_path / "flip.safetensors").write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    (tmp_path / "text.safetensors").write_bytes(b"hello")
    for name, word in (("cut", "whole"), ("flip", "digest"), ("text", "whole"), ("no", "no such")):
        with pytest.raises(ValueError, match=word) as caught:
            load_weights(tmp_path / f"{name}.safetensors")
        assert f"{name}.safetensors" in str(caught.value)


def test_weights_of_another_model_or_not_finite_are_refused(tmp_path: Path) -> None:
    state = dict(WorldModel(TINY).initialize(seed=2).state_dict())
    with pytest.raises(ValueError, match="another model"):
        save_weights(tmp_path / "w.safetensors", state, WorldModelConfig())
    state["patch_in.bias"] = state["patch_in.bias"] + 1e9
    with pytest.raises(ValueError, match="patch_in.bias must be finite"):
        save_weights(tmp_path / "w.safetensors", state, TINY)
