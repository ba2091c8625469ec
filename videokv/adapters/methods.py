"""Installer for models whose methods or functions are replaced, and undone in reverse order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class Patches:
    """Attributes of modules, classes and objects that were replaced for a while.

    What is put in their place stays outside the graphs of code that is compiled.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, replacement: Callable) -> None:
        """``owner.name(...)`` becomes ``replacement(original, ...)``.

        Of modules and objects; see ``wrap_method`` for classes.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        self.put(owner, name, torch.compiler.disable(call))

    def wrap_method(self, cls: type, name: str, replacement: Callable) -> None:
        """``instance.name(...)`` becomes ``replacement(original, instance, ...)``."""
        original = getattr(cls, name)

        @functools.wraps(original)
        def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
            return replacement(original, instance, *args, **kwargs)

        self.put(cls, name, torch.compiler.disable(call))

    def put(self, owner: Any, name: str, value: Any) -> None:
        """``owner.name`` becomes ``value`` until ``undo``."""
        had = name in vars(owner)
        before = vars(owner).get(name)
        setattr(owner, name, value)

        def restore() -> None:
            if had:
                setattr(owner, name, before)
            else:
                delattr(owner, name)

        self._undo.append(restore)

    def undo(self) -> None:
        """Everything as it was before."""
        while self._undo:
            self._undo.pop()()
