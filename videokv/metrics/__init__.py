"""Quality of frames only, by named protocols, and reading clips from files."""

from videokv.metrics.flicker import flicker
from videokv.metrics.flip import flip
from videokv.metrics.frames import Frames
from videokv.metrics.lpips import lpips
from videokv.metrics.measures import PROTOCOL_NAMES, Measured, Protocol, measure, protocol
from videokv.metrics.psnr import Psnr, psnr
from videokv.metrics.reading import read_frames
from videokv.metrics.sharpness import sharpness
from videokv.metrics.ssim import ssim, ssim_per_frame
from videokv.metrics.unavailable import NotAvailable

__all__ = [
    "PROTOCOL_NAMES",
    "Frames",
    "Measured",
    "NotAvailable",
    "Protocol",
    "Psnr",
    "flicker",
    "flip",
    "lpips",
    "measure",
    "protocol",
    "psnr",
    "read_frames",
    "sharpness",
    "ssim",
    "ssim_per_frame",
]
