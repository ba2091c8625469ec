"""The side-by-side video: readable, right in size and length, its panels in their places."""

from pathlib import Path

import av
import numpy as np
import pytest

from videokv.report.video import (
    HOLD_FRAMES,
    LABEL_HEIGHT,
    Layout,
    Panel,
    Scene,
    encode_video,
    write_video,
)

COLOURS = ((200, 40, 40), (40, 180, 60), (50, 80, 210), (190, 180, 40), (150, 60, 170))


def scene(panels: int = 5, frames: int = 7, context: int = 2, height: int = 36) -> Scene:
    shown = tuple(
        Panel(f"recipe {i}", "30.0 dB", np.full((frames, height, 48, 3), COLOURS[i], np.uint8))
        for i in range(panels)
    )
    return Scene(shown, context=context)


def decode(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(stream)])


def test_length_size_and_panels(tmp_path: Path) -> None:
    write_video(tmp_path / "v.mp4", [scene(), scene()])
    frames = decode(tmp_path / "v.mp4")
    assert len(frames) == 2 * (7 + HOLD_FRAMES)
    layout = Layout.of(5, 36, 48)
    assert frames.shape[1:3] == layout.size[::-1]
    for i, colour in enumerate(COLOURS):
        x, y = layout.corner(i)
        cell = frames[6, y + LABEL_HEIGHT + 40 : y + LABEL_HEIGHT + 90, x + 40 : x + 120]
        assert np.abs(cell.reshape(-1, 3).mean(0) - colour).max() < 12
    assert [p.name for p in tmp_path.iterdir()] == ["v.mp4"]


def test_context_is_marked_and_generated_frames_are_not(tmp_path: Path) -> None:
    write_video(tmp_path / "v.mp4", [scene()])
    frames = decode(tmp_path / "v.mp4").astype(int)
    x, y = Layout.of(5, 36, 48).corner(0)
    tag = (slice(y + LABEL_HEIGHT + 2, y + LABEL_HEIGHT + 8), slice(x + 4, x + 50))
    same_as_picture = [np.abs(f[tag] - COLOURS[0]).mean() < 15 for f in frames[:7]]
    assert same_as_picture == [False] * 2 + [True] * 5


@pytest.mark.parametrize(
    ("panels", "columns"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (6, 3), (7, 4), (8, 4), (9, 3)]
)
def test_grids_are_tidy_and_even(panels: int, columns: int) -> None:
    layout = Layout.of(panels, 37, 49)
    assert layout.columns == columns and layout.columns * layout.rows >= panels
    assert all(side % 2 == 0 for side in layout.size)


def test_a_narrow_grid_for_phones() -> None:
    assert Layout.of(8, 72, 96, columns=2).rows == 4
    assert encode_video([scene(panels=2)], columns=1)[4:8] == b"ftyp"


def test_long_and_strange_names_are_drawn() -> None:
    name = "quarot-2bit-psac8+calibrated " * 4 + "日本 <&>"
    panel = Panel(name, "100.0 dB", scene().panels[0].frames)
    assert len(encode_video([Scene((panel,), context=0)])) > 500


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: encode_video([]), "at least one scene"),
        (lambda: Scene((), context=0), "at least one panel"),
        (lambda: scene(context=8), "context must be 0 to 7"),
        (lambda: Scene(scene().panels + scene(frames=6).panels, context=0), "share one shape"),
        (lambda: Scene((Panel("a", "", np.zeros((2, 8, 8, 3))),), context=0), "uint8"),
        (lambda: encode_video([scene(panels=2), scene(panels=3)]), "one grid"),
    ],
)
def test_what_does_not_fit_is_refused(make, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_an_unwritable_folder_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError):
        write_video(tmp_path / "file" / "v.mp4", [scene(panels=1, frames=2)])
