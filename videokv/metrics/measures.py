"""All metrics of a pair of clips, under a protocol that has a name and goes with the figures.

    all           every frame; SSIM with a Gaussian window, LPIPS as published. The default
    first-chunk   the first generated chunk only: differences before rollouts drift apart
    qvg           as Quant VideoGen's metric.py: without frame 0, SSIM with a uniform window,
                  LPIPS with VGG fed [0, 1] as it is

Figures of two protocols are never to be mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from videokv.metrics.flicker import flicker
from videokv.metrics.flip import flip
from videokv.metrics.frames import Frames
from videokv.metrics.lpips import lpips
from videokv.metrics.psnr import psnr
from videokv.metrics.sharpness import sharpness
from videokv.metrics.ssim import Variant, ssim


@dataclass(frozen=True)
class Protocol:
    """first, last: slice of frames that count (last None: to the end)."""

    name: str
    says: str
    first: int = 0
    last: int | None = None
    ssim_variant: Variant = "gaussian"
    rescale_lpips: bool = True

    def __post_init__(self) -> None:
        if self.first < 0 or (self.last is not None and self.last <= self.first):
            raise ValueError(
                f"protocol {self.name!r} must take at least one frame, got {self.first} to "
                f"{self.last}"
            )

    def cut(self, frames: Frames) -> Frames:
        """The frames that count; ValueError where the clip has none of them."""
        kept = frames[self.first : self.last]
        if not len(kept):
            raise ValueError(
                f"protocol {self.name!r} starts at frame {self.first}, the clip has {len(frames)}"
            )
        return kept


PROTOCOLS = {
    "all": Protocol("all", "every frame; SSIM Gaussian 11, sigma 1.5; LPIPS on [-1, 1]"),
    "qvg": Protocol(
        "qvg",
        "without frame 0; SSIM uniform 11, zero padding; LPIPS on [0, 1] as it is",
        first=1,
        ssim_variant="qvg",
        rescale_lpips=False,
    ),
}
FIRST_CHUNK = "first-chunk"
PROTOCOL_NAMES = ("all", FIRST_CHUNK, "qvg")


@dataclass(frozen=True)
class Measured:
    """figures: metric → value; missing: metric → why it is not available; the protocol's name and
    the number of frames that counted."""

    protocol: str
    frames: int
    identical_frames: int
    figures: Mapping[str, float]
    missing: Mapping[str, str]


def protocol(name: str, *, chunk_frames: int = 3) -> Protocol:
    """A protocol by name. chunk_frames: length of the first chunk."""
    if name == FIRST_CHUNK:
        if chunk_frames < 1:
            raise ValueError(f"a chunk has at least 1 frame, got {chunk_frames}")
        return Protocol(name, f"the first {chunk_frames} frames; else as 'all'", last=chunk_frames)
    if name not in PROTOCOLS:
        raise ValueError(f"unknown protocol {name!r}; expected one of {', '.join(PROTOCOL_NAMES)}")
    return PROTOCOLS[name]


def measure(frames: Frames, reference: Frames, *, under: Protocol) -> Measured:
    """Every metric of ``[T, H, W, 3]`` against a reference; what cannot be had says why.

    Raises ValueError where the clips themselves are not fit (shape, dtype, range).
    """
    x, y = under.cut(frames), under.cut(reference)
    distance = psnr(x, y)
    figures = {"psnr_db": distance.psnr_db, "psnr_pooled_db": distance.psnr_pooled_db}
    missing: dict[str, str] = {}
    wanted: dict[str, Callable[[], float]] = {
        "ssim": lambda: ssim(x, y, variant=under.ssim_variant),
        "lpips_alex": lambda: lpips(x, y, net="alex", rescale=under.rescale_lpips),
        "lpips_vgg": lambda: lpips(x, y, net="vgg", rescale=under.rescale_lpips),
        "flip": lambda: flip(x, y),
        "flicker": lambda: flicker(x, y),
        "sharpness": lambda: sharpness(x),
        "sharpness_reference": lambda: sharpness(y),
    }
    for name, compute in wanted.items():
        try:
            figures[name] = compute()
        except ValueError as reason:  # NotAvailable, or too small or short for this metric
            missing[name] = str(reason)
    count = len(distance.per_frame_db)
    return Measured(under.name, count, distance.identical_frames, figures, missing)
