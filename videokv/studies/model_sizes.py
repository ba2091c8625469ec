"""Bytes of the cache of each supported video model, counted from its shape: no weights needed.

python -m videokv.studies.model_sizes docs/models      writes the tables of these pages anew
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

BF16_BYTES = 2
RECIPES = ("rtn-2bit", "quarot-2bit", "qvg-2bit", "rtn-4bit", "rtn-8bit")
START, END = "<!-- sizes: begin -->", "<!-- sizes: end -->"


@dataclass(frozen=True)
class VideoModel:
    """The shape of a model's cache with the settings its repository ships.

    page: file in docs/models. tokens_480p, tokens_720p: of a latent frame at 480 x 832 and
    720 x 1280. held_frames: latent frames in the cache; sink_frames of them stay dense, and so do
    the open_frames still in progress; coarse_frames have a quarter of the tokens. streams: rows a
    token has (2: rotary and ProPE), or guidance branches.
    """

    name: str
    page: str
    layers: int
    kv_heads: int
    head_dim: int
    tokens_480p: int
    tokens_720p: int
    chunk_frames: int
    held_frames: int
    sink_frames: int = 0
    open_frames: int = 0
    streams: int = 1
    coarse_frames: int = 0

    def __post_init__(self) -> None:
        dense = self.sink_frames + self.open_frames
        if not 0 <= dense + self.coarse_frames <= self.held_frames:
            raise ValueError(
                f"{self.name}: {dense} dense frames of {self.held_frames} held, "
                f"{self.coarse_frames} of them coarse; give at most those"
            )

    def token_bytes(self) -> int:
        """Keys and values of one token over all layers in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.streams * BF16_BYTES

    def dense_bytes(self, tokens: int) -> float:
        """All held frames of ``tokens`` each, in bfloat16."""
        return self.held_bytes(tokens, 8 * BF16_BYTES)

    def held_bytes(self, tokens: int, bits: float) -> float:
        """The same with packed rows at ``bits`` an element."""
        dense = self.sink_frames + self.open_frames
        packed = self.held_frames - dense - 0.75 * self.coarse_frames
        return self.token_bytes() * tokens * (dense + packed * bits / (8 * BF16_BYTES))


MODELS = (
    VideoModel("Self-Forcing", "self-forcing", 30, 12, 128, 1560, 3600, 3, 21, open_frames=3),
    VideoModel("Causal-Forcing", "causal-forcing", 30, 12, 128, 1560, 3600, 3, 21, open_frames=3),
    VideoModel("CausVid", "causvid", 30, 12, 128, 1560, 3600, 3, 21, open_frames=3),
    VideoModel("Rolling-Forcing", "rolling-forcing", 30, 12, 128, 1560, 3600, 3, 24, 3, 3),
    VideoModel("LongLive v1", "longlive", 30, 12, 128, 1560, 3600, 3, 12, 3, 3),
    VideoModel("LongLive v2", "longlive", 30, 24, 128, 390, 880, 8, 32, 8, 8),
    VideoModel("Matrix-Game-2", "matrix-game-2", 30, 12, 128, 1560, 3600, 3, 6, open_frames=3),
    VideoModel("LingBot-World", "lingbot-world", 40, 40, 128, 1560, 3600, 3, 68, 6, 3),
    VideoModel("Krea realtime", "krea-realtime", 40, 40, 128, 1560, 3600, 3, 6, open_frames=3),
    VideoModel("LongCat-Video", "longcat-video", 48, 32, 128, 1560, 3600, 19, 19),
    VideoModel("HY-WorldPlay 8B", "hy-worldplay", 54, 16, 128, 1560, 3600, 20, 20, streams=2),
    VideoModel("HY-WorldPlay, Wan", "hy-worldplay", 30, 24, 128, 390, 880, 28, 28, streams=2),
    VideoModel("MAGI-1 4.5B", "magi-1", 34, 8, 128, 1560, 3600, 6, 60, open_frames=6),
    VideoModel("AnyFlow-FAR", "anyflow-far", 40, 40, 128, 1560, 3600, 3, 19, coarse_frames=13),
    VideoModel("SANA-WM refiner", "sana-wm-refiner", 48, 32, 128, 390, 880, 3, 11, 1),
    VideoModel("SkyReels-V2 1.3B", "skyreels-v2", 30, 12, 128, 1560, 3600, 5, 25),
)


@functools.lru_cache(maxsize=64)
def counted_bits(recipe: str, *, tokens: int, head_dim: int) -> float:
    """Bits an element of a chunk that is really encoded."""
    from videokv.recipes import bits_per_element

    return bits_per_element(recipe, tokens=tokens, head_dim=head_dim)


def size_table(model: VideoModel, recipes: tuple[str, ...] = RECIPES) -> str:
    """A Markdown table: recipes down, resolutions across, GiB and the ratio to bfloat16."""
    lines = [
        f"| {model.name}, {model.held_frames} latent frames | 480 x 832 | 720 x 1280 | smaller |",
        "|---|---|---|---|",
        _row("bf16", model, [16.0, 16.0]),
    ]
    for recipe in recipes:
        chunks = [model.chunk_frames * tokens for tokens in _tokens(model)]
        bits = [counted_bits(recipe, tokens=n, head_dim=model.head_dim) for n in chunks]
        lines.append(_row(recipe, model, bits))
    return "\n".join(lines)


def write_tables(folder: Path) -> list[Path]:
    """The tables in the pages of a folder, between their marks, written anew.

    Raises:
        ValueError: a page has no marks.
    """
    written = []
    for page in sorted({model.page for model in MODELS}):
        path = folder / f"{page}.md"
        text = path.read_text()
        if START not in text or END not in text:
            raise ValueError(f"{path} lacks the lines {START!r} and {END!r} that hold its table")
        tables = "\n\n".join(size_table(model) for model in MODELS if model.page == page)
        before, after = text.split(START)[0], text.split(END)[1]
        path.write_text(f"{before}{START}\n{tables}\n{END}{after}")
        written.append(path)
    return written


def _tokens(model: VideoModel) -> tuple[int, int]:
    return model.tokens_480p, model.tokens_720p


def _row(name: str, model: VideoModel, bits: list[float]) -> str:
    sizes = [model.held_bytes(t, b) for t, b in zip(_tokens(model), bits, strict=True)]
    ratio = model.dense_bytes(model.tokens_480p) / sizes[0]
    small, large = (f"{size / 2**30:.2f} GiB" for size in sizes)
    return f"| {name} | {small} | {large} | {ratio:.2f}x |"


if __name__ == "__main__":
    for page in write_tables(Path(sys.argv[1])):
        print(page)
