"""The shape of the shipped world model, in one frozen dataclass."""

from __future__ import annotations

import dataclasses
import json

__all__ = ["ACTIONS", "MIRRORED_ACTION", "WorldModelConfig"]

ACTIONS = ("forward", "turn left", "turn right", "forward+left", "forward+right", "back")
"""What each action number means; actions[t] is the action that leads *to* frame t."""

MIRRORED_ACTION = (0, 2, 1, 4, 3, 5)
"""The action that does in a mirrored view what action i does in the plain one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldModelConfig:
    """Geometry of the model, its training window and its sampler.

    Lengths are in pixels for frames, in frames for ``chunk_frames`` and in chunks for
    ``window_chunks``, ``context_chunks`` and ``clip_chunks``.

    Raises:
        ValueError: a size is not positive, or sizes do not divide as they must.
    """

    height: int = 72
    width_px: int = 96
    patch: int = 8
    chunk_frames: int = 3
    width: int = 384
    heads: int = 3
    blocks: int = 8
    mlp_ratio: int = 4
    window_chunks: int = 8
    context_chunks: int = 2
    clip_chunks: int = 10
    actions: int = len(ACTIONS)
    rope_theta: float = 1000.0
    sample_steps: int = 8
    sample_shift: float = 2.2
    """Moves the sampler's steps to noise: t = s u / (1 + (s - 1) u); e^0.8 = 2.2 is the median
    odds of the noise level that training draws."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kinds = (int,) if field.type == "int" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
                raise ValueError(f"{field.name} must be a positive {field.type}, got {value!r}")
        if self.height % self.patch or self.width_px % self.patch:
            raise ValueError(
                f"patch must divide the frame, got patch {self.patch} for "
                f"{self.width_px}x{self.height}; choose a common divisor"
            )
        if self.width % self.heads or self.head_dim % 2 or self.head_dim < 6:
            raise ValueError(
                f"width / heads must be an even head size of 6 or more, got {self.width} / "
                f"{self.heads}; change width or heads"
            )
        if self.clip_chunks <= self.context_chunks:
            raise ValueError(
                f"clip_chunks must be above context_chunks, got {self.clip_chunks} and "
                f"{self.context_chunks}"
            )

    @property
    def head_dim(self) -> int:
        """Channels a head."""
        return self.width // self.heads

    @property
    def rows(self) -> int:
        """Patches down a frame."""
        return self.height // self.patch

    @property
    def columns(self) -> int:
        """Patches across a frame."""
        return self.width_px // self.patch

    @property
    def frame_tokens(self) -> int:
        """Tokens a frame."""
        return self.rows * self.columns

    @property
    def chunk_tokens(self) -> int:
        """Tokens a chunk."""
        return self.frame_tokens * self.chunk_frames

    @property
    def patch_values(self) -> int:
        """Numbers in one RGB patch."""
        return 3 * self.patch * self.patch

    @property
    def clip_frames(self) -> int:
        """Frames of one training window."""
        return self.clip_chunks * self.chunk_frames

    def to_json(self) -> str:
        """The fields as JSON, for the metadata of a weights file."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> WorldModelConfig:
        """The inverse of :meth:`to_json`; ValueError on anything else."""
        try:
            return cls(**json.loads(text))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"expected a WorldModelConfig as JSON, got {text!r}: {error}"
            ) from None
