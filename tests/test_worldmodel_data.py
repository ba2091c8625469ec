"""Gameplay: deterministic walks that move, and the files they are kept in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from videokv.worldmodel.data import (
    SplitData,
    Walker,
    area_matrix,
    generate_split,
    load_split,
    play_episodes,
    require_vizdoom,
)

try:
    require_vizdoom()
    MISSING = ""
except ImportError as error:
    MISSING = str(error)
with_game = pytest.mark.skipif(bool(MISSING), reason=f"no gameplay: {MISSING}")


def test_area_matrix_averages_exactly() -> None:
    weights = area_matrix(160, 96)
    assert weights.shape == (96, 160)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(weights.sum(0), 96 / 160, rtol=1e-5)
    np.testing.assert_allclose(weights[0, :2], [0.6, 0.4], rtol=1e-5)
    with pytest.raises(ValueError, match="within 1..8"):
        area_matrix(8, 9)


def test_the_walker_turns_to_the_open_side_when_stuck_and_walks_when_free() -> None:
    for side, action in (((200.0, 1.0, 3.0), 1), ((3.0, 1.0, 200.0), 2)):
        walker = Walker(np.random.default_rng(0))
        first = [walker.next_action(20.0, (50.0, 50.0, 50.0)) for _ in range(4)]
        assert first == [0, 0, 0, 0]
        assert walker.next_action(0.0, side) == action
    walker = Walker(np.random.default_rng(1))
    actions = [walker.next_action(20.0, (50.0, 50.0, 50.0)) for _ in range(5000)]
    shares = np.bincount(actions, minlength=6) / 5000
    assert shares.min() > 0.005 and shares[[0, 3, 4]].sum() > 0.6


@with_game
def test_walks_depend_on_their_seed_alone_and_change_the_view() -> None:
    together = list(play_episodes([5, 6], frames=40))
    alone = next(play_episodes([6], frames=40))
    assert np.array_equal(together[1][0], alone[0]) and np.array_equal(together[1][1], alone[1])
    assert not np.array_equal(together[0][0], together[1][0])
    frames = together[0][0].astype(float)
    assert frames.shape == (40, 72, 96, 3)
    assert np.abs(np.diff(frames, axis=0)).mean((1, 2, 3)).min() > 0


@with_game
def test_a_split_does_not_depend_on_the_workers(tmp_path: Path) -> None:
    shape = {"episodes": 3, "frames": 10, "first_seed": 11}
    done = []
    generate_split(tmp_path / "a", workers=1, **shape)
    generate_split(tmp_path / "b", workers=2, progress=lambda d, n: done.append((d, n)), **shape)
    a, b = load_split(tmp_path / "a"), load_split(tmp_path / "b")
    assert np.array_equal(a.frames, b.frames) and np.array_equal(a.actions, b.actions)
    assert a.frames.shape == (3, 10, 72, 96, 3) and list(a.seeds) == [11, 12, 13]
    assert done[-1] == (3, 3)
    with pytest.raises(ValueError, match="exists already"):
        generate_split(tmp_path / "a", workers=1, **shape)


def test_bad_splits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no gameplay"):
        load_split(tmp_path)
    frames = np.zeros((1, 4, 72, 96, 3), np.uint8)
    with pytest.raises(ValueError, match="actions must be below 6"):
        SplitData(frames, np.full((1, 4), 6, np.uint8), np.arange(1))
    with pytest.raises(ValueError, match="frames must be uint8"):
        SplitData(frames.astype(float), np.zeros((1, 4), np.uint8), np.arange(1))
