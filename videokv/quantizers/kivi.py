"""KIVI: keys in groups along the tokens of each channel, values along the channels of each token.

Keys have a few channels that are large in every token; a step of its own for each channel keeps
them from setting the step of all others (2402.02750). Here a chunk is the stream: groups never
cross its borders (the last one may be shorter), and the recent window is the cache's policy: one
chunk unless told otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from videokv.noise import ScoreNoise
from videokv.protocols import EncodeContext, Quantizer, Segment
from videokv.quantizers import register
from videokv.quantizers.groupwise import GroupedChunk, Groupwise
from videokv.quantizers.inputs import check_count, check_flag, checked
from videokv.tensors import GroupFormat, held_bytes, require_finite


def kivi_formats(
    bits: int, *, group_size: int = 32, fp16_scales: bool = False
) -> tuple[GroupFormat, GroupFormat]:
    """Key and value format. ``fp16_scales``: steps and minima in FP16, as the authors' code has
    them, ``bits + 32 / group_size`` bits an element; else E4M3 and BF16, ``+ 24 / group_size``.
    """
    check_flag("fp16_scales", fp16_scales)
    scale = torch.float16 if fp16_scales else None
    zero = torch.float16 if fp16_scales else torch.bfloat16
    keys, values = (
        GroupFormat(bits, group_size, axis=axis, scale_dtype=scale, zero_dtype=zero)
        for axis in ("channel", "token")
    )
    return keys, values


@register(
    "kivi",
    bits=(2, 4),
    summary="keys per channel, values per token (KIVI)",
    policy_defaults={"recent_chunks": 1},  # the dense recent window, in chunk-wise use
)
def build_kivi(
    bits: int, *, group_size: int = 32, fp16_scales: bool = False
) -> tuple[Quantizer, Quantizer]:
    """The options are those of ``kivi_formats``."""
    keys, values = kivi_formats(bits, group_size=group_size, fp16_scales=fp16_scales)
    return Groupwise(keys), Groupwise(values)


class KiviStream:
    """The published cache for one token at a time: a dense recent window that each side leaves.

    Keys wait until ``recent`` of them (a multiple of the group) can be packed as one block, so
    0..recent - 1 stay dense between calls; values leave one by one, the last ``recent`` stay dense.
    A block that a call fills is packed by the next call: the call's own scores see it dense.
    """

    def __init__(
        self,
        bits: int,
        *,
        group_size: int = 32,
        recent: int = 128,
        fp16_scales: bool = False,
        layer: int = 0,
    ) -> None:
        check_count("recent", recent)
        formats = kivi_formats(bits, group_size=group_size, fp16_scales=fp16_scales)
        if recent % group_size:
            raise ValueError(
                f"recent must be a multiple of group_size {group_size}, got {recent!r}"
            )
        self.recent = recent
        self._quantizers = tuple(Groupwise(format) for format in formats)
        self._contexts = (EncodeContext(layer, "key"), EncodeContext(layer, "value"))
        self._packed: tuple[list[GroupedChunk], list[GroupedChunk]] = ([], [])
        self._dense: list[Tensor] = []

    @property
    def dense_keys(self) -> int:
        """Keys that are held as they came."""
        return self._dense[0].shape[2] if self._dense else 0

    @property
    def dense_values(self) -> int:
        """Values that are held as they came."""
        return self._dense[1].shape[2] if self._dense else 0

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add the keys ``[B, H, T, D]`` and values ``[B, H, T, Dv]`` of T >= 1 new tokens.

        Raises ValueError where they are not finite or not like those before; nothing is added then.
        """
        new = [checked(keys), checked(values)]
        if keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                "keys and values must be of the same tokens, "
                f"got {tuple(keys.shape)} and {tuple(values.shape)}"
            )
        for side, x in enumerate(new):
            self._require_usable(side, x)
        if self._dense:
            self._pack(0, self.dense_keys // self.recent * self.recent)
            new = [torch.cat(pair, 2) for pair in zip(self._dense, new, strict=True)]
        self._dense = new
        if keys.shape[2] > 1:  # a prompt is attended dense by its own call: pack at once
            self._pack(0, self.dense_keys // self.recent * self.recent)
        self._pack(1, max(0, self.dense_values - self.recent))

    def segment(self, dtype: torch.dtype) -> Segment:
        """All tokens so far in ``dtype``, with the noise of the packed keys (0 for dense ones)."""
        if not self._dense:
            raise ValueError("the stream holds no token yet; append some first")
        keys, values = (
            torch.cat([*(chunk.decode(dtype) for chunk in packed), dense.to(dtype)], 2)
            for packed, dense in zip(self._packed, self._dense, strict=True)
        )
        return Segment(keys, values, self._noise())

    def held_bytes(self) -> int:
        """Bytes of everything that is kept."""
        return held_bytes(self._packed, self._dense)

    def _noise(self) -> tuple[ScoreNoise, ...]:
        terms = [term for chunk in self._packed[0] for term in chunk.noise()]
        if not terms:
            return ()
        last = terms[-1].weights
        exact = last.new_zeros(*last.shape[:2], self.dense_keys, last.shape[3])
        weights = torch.cat([*(term.weights for term in terms), exact], 2)
        return (ScoreNoise(weights, terms[-1].query_map),)

    def _require_usable(self, side: int, x: Tensor) -> None:
        context = self._contexts[side]
        self._quantizers[side].check(x.shape[-1])
        require_finite(x, what=f"{context.role}s", layer=context.layer)
        held = _like(self._dense[side] if self._dense else x)
        if _like(x) != held:
            raise ValueError(
                f"the stream holds {context.role}s {held}, got {_like(x)}; start another stream"
            )

    def _pack(self, side: int, count: int) -> None:
        """Pack the oldest ``count`` dense tokens of the keys (0) or the values (1)."""
        if not count:
            return
        dense, packed = self._dense[side], self._packed[side]
        chunk = self._quantizers[side].encode(dense[:, :, :count], self._contexts[side])
        self._dense[side] = dense[:, :, count:].clone()  # lets go of the packed rows
        if packed and packed[-1].normaliser is None and chunk.normaliser is None:
            packed[-1] = _joined(packed[-1], chunk)
        else:
            packed.append(chunk)


def _like(x: Tensor) -> str:
    batch, heads, _, size = x.shape
    return f"[{batch}, {heads}, T, {size}] of {x.dtype}"


def _joined(first: GroupedChunk, second: GroupedChunk) -> GroupedChunk:
    """Two chunks one after the other, the first of whole groups."""
    assert first.zeros is not None and second.zeros is not None  # asymmetric codes
    return replace(
        first,
        packed=torch.cat([first.packed, second.packed], 2),
        steps=torch.cat([first.steps, second.steps], 2),
        zeros=torch.cat([first.zeros, second.zeros], 2),
    )
