"""KIVI: keys in groups along the tokens of each channel, values along the channels of each token.

Keys have a few channels that are large in every token; a step of its own for each channel keeps
them from setting the step of all others (2402.02750). Here a chunk is the stream: groups never
cross its borders (the last one may be shorter), and the recent window is the cache's policy.
"""

from __future__ import annotations

import torch

from videokv.protocols import Quantizer
from videokv.quantizers import register
from videokv.quantizers.groupwise import Groupwise
from videokv.tensors import GroupFormat


def kivi_formats(
    bits: int, *, group_size: int = 32, fp16_scales: bool = False
) -> tuple[GroupFormat, GroupFormat]:
    """Key and value format. ``fp16_scales``: steps and minima in FP16, as the authors' code has
    them, ``bits + 32 / group_size`` bits an element; else E4M3 and BF16, ``+ 24 / group_size``.
    """
    scale = torch.float16 if fp16_scales else None
    zero = torch.float16 if fp16_scales else torch.bfloat16
    keys, values = (
        GroupFormat(bits, group_size, axis=axis, scale_dtype=scale, zero_dtype=zero)
        for axis in ("channel", "token")
    )
    return keys, values


@register("kivi", bits=(2, 4), summary="keys per channel, values per token (KIVI)")
def build_kivi(
    bits: int, *, group_size: int = 32, fp16_scales: bool = False
) -> tuple[Quantizer, Quantizer]:
    """The options are those of ``kivi_formats``."""
    keys, values = kivi_formats(bits, group_size=group_size, fp16_scales=fp16_scales)
    return Groupwise(keys), Groupwise(values)
