"""Names and colours of recipes, the same in the plots, the video and the page."""

from __future__ import annotations

from collections.abc import Sequence

from videokv.studies.demo import REFERENCE

# Mid-tone colours that keep their contrast on white and on near-black.
REFERENCE_COLOUR = "#7d8590"
COLOURS = (
    "#2f81b7", "#d1495b", "#e08a3c", "#8f63c9", "#3f9e6e", "#c2a01e", "#cf5f9d", "#5f7f3f",
)  # fmt: skip

# metric → (heading, unit, digits, factor)
COLUMNS: dict[str, tuple[str, str, int, float]] = {
    "psnr_db": ("PSNR", "dB to BF16", 2, 1),
    "ssim": ("SSIM", "to BF16", 3, 1),
    "bits_per_element": ("Bits", "per element", 2, 1),
    "ratio": ("Smaller", "×", 2, 1),
    "held_bytes": ("Held", "MB a clip", 2, 1e-6),
    "cached_mass": ("Cached mass", "%", 2, 100),
    "sharpness": ("Sharpness", "×1000", 2, 1000),
    "seconds_per_chunk": ("Time", "s a chunk", 2, 1),
}


def colour_of(recipe: str, recipes: Sequence[str]) -> str:
    """A recipe's colour by its place among ``recipes``; grey for the reference."""
    if recipe == REFERENCE:
        return REFERENCE_COLOUR
    quantized = [name for name in recipes if name != REFERENCE]
    return COLOURS[quantized.index(recipe) % len(COLOURS)]


def dash_of(recipe: str) -> str:
    """Solid for a corrected recipe and the reference, dashed for one without a correction."""
    return "solid" if "+" in recipe or recipe == REFERENCE else "dashed"


def megabytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"
