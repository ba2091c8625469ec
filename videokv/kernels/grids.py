"""Sizes of grids and blocks in plain integers.

``triton.cdiv`` and ``triton.next_power_of_2`` give the same, but are made for kernels too: outside
of one they look for constants to unwrap, which takes the host several microseconds a call.
"""

from __future__ import annotations


def cdiv(count: int, unit: int) -> int:
    """``count / unit``, rounded up."""
    return -(-count // unit)


def next_power_of_2(count: int) -> int:
    """The smallest power of two that is at least ``count`` (1 or more)."""
    return 1 << (count - 1).bit_length()
