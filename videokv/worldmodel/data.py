"""Gameplay for the world model: a random walker in ViZDoom's ``my_way_home``.

Every episode is a function of its seed alone. A split is a folder with three files that numpy
can memory-map: ``frames.npy`` uint8 [E, T, 72, 96, 3], ``actions.npy`` uint8 [E, T] (the action
that leads *to* each frame) and ``seeds.npy`` int64 [E].
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from videokv.worldmodel.config import ACTIONS

__all__ = [
    "HELDOUT_SEED",
    "SplitData",
    "Walker",
    "area_matrix",
    "generate_split",
    "load_split",
    "play_episode",
    "require_vizdoom",
]

U8 = npt.NDArray[np.uint8]

HEIGHT, WIDTH = 72, 96
SOURCE_HEIGHT, SOURCE_WIDTH = 120, 160
TICS_PER_FRAME = 3
HELDOUT_SEED = 1_000_000_000
"""Train seeds stay below this number, held-out seeds start at it."""

# Buttons of each action, in the order forward, back, turn left, turn right.
_BUTTONS = (
    (1, 0, 0, 0),
    (0, 0, 1, 0),
    (0, 0, 0, 1),
    (1, 0, 1, 0),
    (1, 0, 0, 1),
    (0, 1, 0, 0),
)
_WARM_UP_FRAMES = 4


def require_vizdoom() -> ModuleType:
    """ViZDoom, imported on first use; ImportError names the extra that brings it."""
    try:
        import vizdoom
    except ImportError as error:
        raise ImportError(
            "gameplay needs ViZDoom, which could not be imported "
            f"({error}); install it with: pip install 'videokv[worldmodel-train]'"
        ) from error
    return vizdoom


class Walker:
    """A random walker with momentum: it walks more than it spins and does not stare at walls.

    It keeps an action for a random number of frames. Before a wall, or when a step forward
    hardly moves it, it turns to the more open side and walks on from there.
    """

    # Action, weight, fewest and most frames. Long turns look back at what was left.
    _SEGMENTS = (
        (0, 0.34, 5, 16),
        (3, 0.16, 3, 10),
        (4, 0.16, 3, 10),
        (1, 0.11, 4, 12),
        (2, 0.11, 4, 12),
        (1, 0.03, 14, 22),
        (2, 0.03, 14, 22),
        (5, 0.06, 3, 8),
    )
    _STUCK_UNITS = 6.0
    _NEAR_DEPTH = 5.0  # about 60 map units, three free steps
    _GATHERING_FRAMES = 2  # a walker that has just set off is slow without being stuck

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._start(0, 6, 6)

    def next_action(self, moved_units: float, open_view: tuple[float, float, float]) -> int:
        """The next action.

        Args:
            moved_units: how far the last action moved the walker, in map units.
            open_view: depth at eye height, left, ahead and right (of 255, larger is farther).
        """
        left, ahead, right = open_view
        turning = self._action in (1, 2)
        gathered = self._held >= self._GATHERING_FRAMES
        stuck = not turning and gathered and moved_units < self._STUCK_UNITS
        wall = self._action in (0, 3, 4) and ahead < self._NEAR_DEPTH and self._rng.random() < 0.7
        if stuck or wall:
            self._start(1 if left > right else 2, 3, 9)
        elif self._left <= 0 and turning:
            if ahead < self._NEAR_DEPTH:  # still a wall ahead: the same way on
                self._start(self._action, 2, 5)
            else:  # having turned, walk
                self._start(int(self._rng.choice((0, 0, 3, 4))), 5, 14)
        elif self._left <= 0:
            self._choose()
        self._left -= 1
        self._held += 1
        return self._action

    def _choose(self) -> None:
        weights = np.array([segment[1] for segment in self._SEGMENTS])
        action, _, low, high = self._SEGMENTS[self._rng.choice(len(weights), p=weights)]
        self._start(action, low, high)

    def _start(self, action: int, low: int, high: int) -> None:
        self._action, self._held = action, 0
        self._left = int(self._rng.integers(low, high + 1))


def area_matrix(source: int, target: int) -> npt.NDArray[np.float32]:
    """Weights [target, source] of shrinking a line of pixels by exact area.

    Raises:
        ValueError: target is not within 1..source.
    """
    if not 1 <= target <= source:
        raise ValueError(f"target must be within 1..{source} pixels, got {target}")
    edges = np.arange(target + 1) * (source / target)
    pixels = np.arange(source)
    upper = np.minimum(edges[1:, None], pixels + 1)
    lower = np.maximum(edges[:-1, None], pixels)
    return (np.clip(upper - lower, 0, None) * (target / source)).astype(np.float32)


_DOWN = area_matrix(SOURCE_HEIGHT, HEIGHT)
_ACROSS = area_matrix(SOURCE_WIDTH, WIDTH)


def _shrink(screen: U8) -> U8:
    """[120, 160, 3] → [72, 96, 3], by area."""
    lines = _DOWN @ screen.reshape(SOURCE_HEIGHT, -1).astype(np.float32)
    columns = _ACROSS @ lines.reshape(HEIGHT, SOURCE_WIDTH, 3)
    return np.clip(np.rint(columns), 0, 255).astype(np.uint8)


def _open_view(depth: U8) -> tuple[float, float, float]:
    """Mean depth at eye height of the left, middle and right of a [120, 160] depth image."""
    band = depth[56:62].astype(np.float32)
    return float(band[:, :53].mean()), float(band[:, 60:100].min()), float(band[:, 107:].mean())


def _open_game(folder: str) -> Any:
    """A running game without HUD, weapon or window; its settings file lives in ``folder``."""
    vizdoom = require_vizdoom()
    game = vizdoom.DoomGame()
    root = Path(vizdoom.__path__[0])
    game.load_config(str(root / "scenarios" / "my_way_home.cfg"))
    # The level takes its textures from Freedoom 2; Freedoom 1 is never read.
    game.set_doom_game_path(str(root / "freedoom2.wad"))
    game.set_doom_config_path(str(Path(folder) / "vizdoom.ini"))
    game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
    game.set_screen_format(vizdoom.ScreenFormat.RGB24)
    game.set_depth_buffer_enabled(True)  # for the walker alone; it is not kept
    for hide in ("hud", "weapon", "crosshair", "decals", "particles", "messages"):
        getattr(game, f"set_render_{hide}")(False)
    button = vizdoom.Button
    game.set_available_buttons(
        [button.MOVE_FORWARD, button.MOVE_BACKWARD, button.TURN_LEFT, button.TURN_RIGHT]
    )
    variable = vizdoom.GameVariable
    game.set_available_game_variables([variable.POSITION_X, variable.POSITION_Y])
    game.set_window_visible(False)
    game.set_sound_enabled(False)
    game.set_episode_timeout(0)
    game.set_mode(vizdoom.Mode.PLAYER)
    game.init()
    return game


def play_episode(game: Any, *, seed: int, frames: int) -> tuple[U8, U8]:
    """One walk: frames uint8 [frames, 72, 96, 3] and actions uint8 [frames].

    A walk that reaches the level's end is thrown away and tried again from a derived seed.
    """
    for attempt in range(100):
        walk = _try_episode(game, seed=seed, attempt=attempt, frames=frames)
        if walk is not None:
            return walk
    raise RuntimeError(f"seed {seed} gave no walk of {frames} frames in 100 attempts")


def _try_episode(game: Any, *, seed: int, attempt: int, frames: int) -> tuple[U8, U8] | None:
    rng = np.random.default_rng([seed, attempt])
    game.set_seed(int(rng.integers(1, 2**31)))
    game.new_episode()
    walker = Walker(rng)
    images = np.empty((frames, HEIGHT, WIDTH, 3), np.uint8)
    actions = np.empty(frames, np.uint8)
    state = game.get_state()
    place, moved = np.array(state.game_variables), 0.0
    for step in range(-_WARM_UP_FRAMES, frames):
        action = walker.next_action(moved, _open_view(state.depth_buffer))
        game.make_action(list(_BUTTONS[action]), TICS_PER_FRAME)
        if game.is_episode_finished():
            return None
        state = game.get_state()
        moved = float(np.hypot(*(state.game_variables - place)))
        place = np.array(state.game_variables)
        if step >= 0:
            images[step], actions[step] = _shrink(state.screen_buffer), action
    return images, actions


def play_episodes(seeds: list[int], *, frames: int) -> Iterator[tuple[U8, U8]]:
    """The walks of ``seeds``, one game for all of them."""
    with tempfile.TemporaryDirectory(prefix="videokv-doom-") as folder:
        game = _open_game(folder)
        try:
            for seed in seeds:
                yield play_episode(game, seed=seed, frames=frames)
        finally:
            game.close()


@dataclasses.dataclass(frozen=True)
class SplitData:
    """Walks: frames uint8 [E, T, 72, 96, 3], actions uint8 [E, T], seeds int64 [E]."""

    frames: U8
    actions: U8
    seeds: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        frames, actions, seeds = self.frames, self.actions, self.seeds
        if frames.ndim != 5 or frames.dtype != np.uint8 or frames.shape[-1] != 3:
            raise ValueError(
                f"frames must be uint8 [E, T, H, W, 3], got {frames.dtype} {frames.shape}"
            )
        if actions.shape != frames.shape[:2] or actions.dtype != np.uint8:
            raise ValueError(
                f"actions must be uint8 {frames.shape[:2]}, got {actions.dtype} {actions.shape}"
            )
        if seeds.shape != frames.shape[:1]:
            raise ValueError(f"seeds must be [{frames.shape[0]}], got {seeds.shape}")
        if actions.size and int(actions.max()) >= len(ACTIONS):
            raise ValueError(f"actions must be below {len(ACTIONS)}, got {actions.max()}")


def _fill(folder: str, first: int, seeds: list[int], frames: int) -> int:
    """Write the walks of ``seeds`` at rows ``first``...; runs in a worker process."""
    images = np.load(Path(folder) / "frames.npy", mmap_mode="r+")
    actions = np.load(Path(folder) / "actions.npy", mmap_mode="r+")
    for row, (walk, steps) in enumerate(play_episodes(seeds, frames=frames), first):
        images[row], actions[row] = walk, steps
    images.flush()
    actions.flush()
    return len(seeds)


def generate_split(
    folder: str | Path,
    *,
    episodes: int,
    frames: int,
    first_seed: int,
    workers: int,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Play ``episodes`` walks of ``frames`` frames with seeds first_seed... into ``folder``.

    The files do not depend on ``workers``. The folder appears only once it is whole.

    Args:
        progress: called with (episodes done, episodes) as they are finished.

    Raises:
        ValueError: a count is not positive, or the folder exists already.
        ImportError: ViZDoom is not installed.
    """
    require_vizdoom()
    for name, value in (("episodes", episodes), ("frames", frames), ("workers", workers)):
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists already; remove it or name another folder")
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    _allocate(part, episodes=episodes, frames=frames)
    seeds = list(range(first_seed, first_seed + episodes))
    np.save(part / "seeds.npy", np.array(seeds, np.int64))
    size = max(1, -(-episodes // (4 * workers)))
    done = 0
    context = multiprocessing.get_context("spawn")
    with _single_threaded(), ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = [
            pool.submit(_fill, str(part), first, seeds[first : first + size], frames)
            for first in range(0, episodes, size)
        ]
        for job in as_completed(jobs):
            done += job.result()
            if progress is not None:
                progress(done, episodes)
    os.replace(part, folder)
    return folder


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Processes started inside use one thread each: as many as there are workers is enough.

    Without it every worker's small matrix products start a thread a core, and 16 workers on 16
    cores make less than a tenth of the frames.
    """
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _allocate(folder: Path, *, episodes: int, frames: int) -> None:
    shape = (episodes, frames, HEIGHT, WIDTH, 3)
    for name, size in (("frames", shape), ("actions", shape[:2])):
        np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.uint8, shape=size)


def load_split(folder: str | Path) -> SplitData:
    """The walks in ``folder``, memory-mapped; ValueError names what is missing or wrong."""
    folder = Path(folder)
    try:
        arrays = [np.load(folder / f"{n}.npy", mmap_mode="r") for n in ("frames", "actions")]
        seeds = np.load(folder / "seeds.npy")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} holds no gameplay ({error}); make it with: videokv worldmodel data"
        ) from error
    return SplitData(arrays[0], arrays[1], seeds)
