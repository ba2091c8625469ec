"""Which chunks of a cache are packed, which stay dense, and which are dropped."""

from __future__ import annotations

from dataclasses import dataclass


def is_count(value: object) -> bool:
    """Whether a value is an integer; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class CachePolicy:
    """Rules in whole chunks. A chunk's grid is fixed once, so no rule ever packs a chunk twice.

    sink_chunks: the first chunks stay dense and are never dropped.
    recent_chunks: the newest chunks stay dense; each is packed when it ages out.
    window_chunks: chunks held at most, the sink included; older ones are dropped. None: all.
    chunk_tokens: cut what is committed into chunks of exactly this many tokens, the rest waiting
        dense until it fills one (token streaming). None: one commit makes one chunk (video).
    """

    sink_chunks: int = 0
    recent_chunks: int = 0
    window_chunks: int | None = None
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("sink_chunks", 0),
            ("recent_chunks", 0),
            ("window_chunks", 1),
            ("chunk_tokens", 1),
        ):
            value = getattr(self, name)
            if value is None and least == 1:
                continue
            if not is_count(value) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.window_chunks is not None and self.window_chunks < self.sink_chunks:
            raise ValueError(
                f"window_chunks counts the sink, so it must be at least sink_chunks = "
                f"{self.sink_chunks}, got {self.window_chunks}"
            )

    def surplus(self, ordinals: list[int]) -> set[int]:
        """Of the chunks held, given by age (0: the first ever), those to drop, oldest first."""
        if self.window_chunks is None:
            return set()
        mortal = [ordinal for ordinal in ordinals if ordinal >= self.sink_chunks]
        return set(mortal[: max(0, len(ordinals) - self.window_chunks)])

    def stays_dense(self, ordinal: int, newest: int) -> bool:
        """Whether the chunk is sink or recent while ``newest`` is the last one committed."""
        return ordinal < self.sink_chunks or ordinal > newest - self.recent_chunks
