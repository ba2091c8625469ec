"""Methods that torch.compile leaves alone: a graph ends before the call and a new one begins after.

Inside a cache there is Python that differs from chunk to chunk (which chunks are packed, which
kernels were checked). Traced, every new chunk would be a new graph; left out, the model around the
cache is compiled once for each of its own shapes.

``torch.compiler.disable`` does it, but importing the compiler takes longer than importing torch,
and brings Triton: it is asked only once somebody else has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

COMPILER = "torch._dynamo"
REASON = "a videokv cache differs from chunk to chunk; only the model around it is compiled"
Owner = TypeVar("Owner", bound=type)


def outside_graphs(*names: str) -> Callable[[Owner], Owner]:
    """Class decorator: the methods and properties called ``names`` are never traced."""

    def changed(owner: Owner) -> Owner:
        for name in names:
            member = vars(owner)[name]
            if isinstance(member, property):
                assert member.fget is not None
                setattr(
                    owner, name, property(_lazily(owner, name, member.fget), doc=member.__doc__)
                )
            else:
                setattr(owner, name, _lazily(owner, name, member))
        return owner

    return changed


def _lazily(owner: type, name: str, method: Callable) -> Callable:
    """``method`` until the compiler is there; then what it never traces takes its place."""
    if COMPILER in sys.modules:
        untraced: Callable = torch.compiler.disable(method, reason=REASON)
        return untraced

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if COMPILER not in sys.modules:
            return method(*args, **kwargs)
        untraced = torch.compiler.disable(method, reason=REASON)
        now = vars(owner)[name]
        if isinstance(now, property) and now.fget is call:
            setattr(owner, name, property(untraced, doc=now.__doc__))
        elif now is call:
            setattr(owner, name, untraced)
        return untraced(*args, **kwargs)

    return call
