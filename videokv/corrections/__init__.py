"""Corrections: one file each; a module-level ``CORRECTION`` object is found by itself."""

from __future__ import annotations

import importlib
import pkgutil

from videokv.protocols import Correction


def corrections() -> dict[str, Correction]:
    """All corrections by name (the word after ``+`` in a recipe)."""
    found: dict[str, Correction] = {}
    for module in pkgutil.iter_modules(__path__):
        correction = importlib.import_module(f"{__name__}.{module.name}").CORRECTION
        found[correction.name] = correction
    return dict(sorted(found.items()))
