"""The side-by-side video: the real game, the BF16 rollout, then every recipe, in one grid."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from videokv.studies.results import write_bytes

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

Frames = NDArray[np.uint8]

FRAMES_PER_SECOND = 10
HOLD_FRAMES = 8  # the last frame of a clip stays this long
PANEL_PIXELS = 320  # the widest a panel is made by whole-number upscaling
GAP = 12
LABEL_HEIGHT = 30
FOOTER_HEIGHT = 34
BACKGROUND = (17, 19, 23)
TEXT = (232, 234, 237)
DIM = (150, 156, 165)
ACCENT = (224, 138, 60)


@dataclass(frozen=True)
class Panel:
    """One cell of the grid. frames: uint8 ``[T, H, W, 3]``; note: what stands to the right."""

    title: str
    note: str
    frames: Frames


@dataclass(frozen=True)
class Scene:
    """One clip: panels of equal length, of which the first ``context`` frames are real ones."""

    panels: tuple[Panel, ...]
    context: int

    def __post_init__(self) -> None:
        if not self.panels:
            raise ValueError("a scene needs at least one panel, got none")
        shapes = [p.frames.shape for p in self.panels]
        first = self.panels[0].frames
        if len(set(shapes)) != 1 or first.ndim != 4 or first.shape[-1] != 3:
            raise ValueError(f"panels must share one shape [T, H, W, 3], got {shapes}")
        if any(p.frames.dtype != np.uint8 for p in self.panels):
            raise ValueError("panels must be uint8")
        if not 0 <= self.context <= len(first):
            raise ValueError(f"context must be 0 to {len(first)} frames, got {self.context}")


@dataclass(frozen=True)
class Layout:
    """Grid in pixels: ``scale`` enlarges a frame, width and height are even (yuv420p)."""

    columns: int
    rows: int
    scale: int
    cell_width: int
    cell_height: int

    @classmethod
    def of(
        cls, panels: int, frame_height: int, frame_width: int, *, columns: int | None = None
    ) -> Layout:
        columns = _columns(panels) if columns is None else min(columns, panels)
        scale = max(1, min(3, PANEL_PIXELS // frame_width))
        return cls(columns, -(-panels // columns), scale, frame_width * scale, frame_height * scale)

    @property
    def size(self) -> tuple[int, int]:
        width = self.columns * self.cell_width + (self.columns + 1) * GAP
        height = self.rows * (self.cell_height + LABEL_HEIGHT) + GAP + FOOTER_HEIGHT
        return width + width % 2, height + height % 2

    def corner(self, index: int) -> tuple[int, int]:
        """Upper left of the label of a cell; its picture stands LABEL_HEIGHT below."""
        row, column = divmod(index, self.columns)
        x = GAP + column * (self.cell_width + GAP)
        return x, GAP // 2 + row * (self.cell_height + LABEL_HEIGHT)


def _columns(panels: int) -> int:
    """The fewest empty cells, at most four columns, never one long column."""
    if panels <= 4:
        return 2 if panels == 4 else panels
    return min((4, 3), key=lambda columns: -panels % columns)


def write_video(path: Path, scenes: Sequence[Scene]) -> None:
    """Write the scenes one after the other as H.264, yuv420p, whole or not at all.

    Raises ValueError where the scenes differ in grid or the av package lacks an H.264 encoder.
    """
    write_bytes(path, encode_video(scenes))


def encode_video(scenes: Sequence[Scene], *, columns: int | None = None) -> bytes:
    """The bytes of the mp4 that ``write_video`` writes; columns of the grid: fitting by default."""
    if not scenes:
        raise ValueError("a video needs at least one scene, got none")
    first = scenes[0].panels
    grids = {(len(s.panels), s.panels[0].frames.shape[1:]) for s in scenes}
    if len(grids) != 1:
        raise ValueError(f"all scenes must have one grid and frame size, got {sorted(grids)}")
    layout = Layout.of(len(first), *first[0].frames.shape[1:3], columns=columns)
    images = (
        image
        for number, scene in enumerate(scenes, start=1)
        for image in _draw_scene(scene, layout, f"clip {number} of {len(scenes)}")
    )
    return _encode(images, layout.size)


def _encode(images: Iterator[Image], size: tuple[int, int]) -> bytes:
    import av

    if "libx264" not in av.codecs_available:
        raise ValueError("this build of the av package has no H.264 encoder (libx264)")
    with tempfile.TemporaryDirectory() as folder:  # faststart reads its own file a second time
        path = Path(folder) / "comparison.mp4"
        _mux(path, images, size)
        return path.read_bytes()


def _mux(path: Path, images: Iterator[Image], size: tuple[int, int]) -> None:
    import av

    options = {"movflags": "+faststart"}
    with av.open(str(path), "w", format="mp4", options=options) as container:
        stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.options = {"crf": "18", "preset": "veryfast"}
        for image in images:
            for packet in stream.encode(av.VideoFrame.from_image(image)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def _draw_scene(scene: Scene, layout: Layout, caption: str) -> Iterator[Image]:
    from PIL import Image

    base = _draw_labels(scene, layout)
    count = len(scene.panels[0].frames)
    for t in range(count):
        image = base.copy()
        for index, panel in enumerate(scene.panels):
            x, y = layout.corner(index)
            picture = Image.fromarray(panel.frames[t]).resize(
                (layout.cell_width, layout.cell_height), Image.Resampling.NEAREST
            )
            image.paste(picture, (x, y + LABEL_HEIGHT))
        if t < scene.context:
            _mark_context(image, scene, layout)
        _draw_footer(image, layout, caption, t, count, scene.context)
        yield image
    for _ in range(HOLD_FRAMES):
        yield image


def _draw_labels(scene: Scene, layout: Layout) -> Image:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", layout.size, BACKGROUND)
    draw = ImageDraw.Draw(image)
    for index, panel in enumerate(scene.panels):
        x, y = layout.corner(index)
        right, middle = x + layout.cell_width, y + LABEL_HEIGHT // 2
        note = _font(13)
        room = layout.cell_width - note.getlength(panel.note) - 10
        draw.text((right, middle), panel.note, fill=DIM, font=note, anchor="rm")
        title = _fit(panel.title, room)
        draw.text((x, middle), panel.title, fill=TEXT, font=title, anchor="lm")
    return image


def _mark_context(image: Image, scene: Scene, layout: Layout) -> None:
    from PIL import ImageDraw

    draw, font = ImageDraw.Draw(image), _font(12)
    for index in range(len(scene.panels)):
        x, y = layout.corner(index)
        top = y + LABEL_HEIGHT
        box = (x, top, x + layout.cell_width - 1, top + layout.cell_height - 1)
        draw.rectangle(box, outline=ACCENT, width=2)
        width = int(font.getlength("context")) + 12
        draw.rectangle((x, top, x + width, top + 20), fill=ACCENT)
        draw.text((x + 6, top + 10), "context", fill=BACKGROUND, font=font, anchor="lm")


def _draw_footer(
    image: Image, layout: Layout, caption: str, t: int, count: int, context: int
) -> None:
    """The clip's number, what is on screen, and a line of time with the context in its colour."""
    from PIL import ImageDraw

    draw, font = ImageDraw.Draw(image), _font(13)
    width, height = layout.size
    middle = height - FOOTER_HEIGHT // 2
    what = "real frames given" if t < context else f"generated frame {t + 1 - context}"
    draw.text((GAP, middle), f"{caption} · {what}", fill=DIM, font=font, anchor="lm")
    left = GAP + int(font.getlength(f"{caption} · generated frame 00")) + 16
    span = width - GAP - left
    if span < 40:
        return
    at = [left + span * i // count for i in (0, context, t + 1, count)]
    draw.rectangle((left, middle - 2, at[3], middle + 1), fill=(48, 52, 60))
    draw.rectangle((left, middle - 2, at[2], middle + 1), fill=DIM)
    draw.rectangle((left, middle - 2, min(at[1], at[2]), middle + 1), fill=ACCENT)


def _fit(text: str, room: float) -> FreeTypeFont:
    """The largest font from 14 points down in which the text fits, 8 at the least."""
    for points in range(14, 8, -1):
        if _font(points).getlength(text) <= room:
            return _font(points)
    return _font(8)


def _font(points: int) -> FreeTypeFont:
    import matplotlib
    from PIL import ImageFont

    # matplotlib carries this font: labels look alike wherever the video is made
    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", points)
