"""Quality of frames only: PSNR, SSIM, sharpness, and reading clips from files."""

from videokv.metrics.frames import Frames
from videokv.metrics.psnr import Psnr, psnr
from videokv.metrics.reading import read_frames
from videokv.metrics.sharpness import sharpness
from videokv.metrics.ssim import ssim, ssim_per_frame

__all__ = ["Frames", "Psnr", "psnr", "read_frames", "sharpness", "ssim", "ssim_per_frame"]
