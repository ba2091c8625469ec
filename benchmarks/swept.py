"""Recipes of the sweeps: ``rtn-2bit+taylor*1.5``, ``rtn-2bit@g64+calibrated``, other fits."""

from __future__ import annotations

import dataclasses

from fits import FITS
from torch import Tensor

from videokv.corrections.taylor import Taylor
from videokv.noise import ScoreNoise
from videokv.protocols import Correction, Packed
from videokv.recipes import Recipe, recipe


class ScaledTaylor(Taylor):
    """Taylor times a fixed number."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def noise(self, packed: Packed, factors: Tensor | None) -> tuple[ScoreNoise, ...]:
        """The terms of the steps, multiplied."""
        return tuple(term.scaled(self.factor) for term in packed.noise())


@dataclasses.dataclass(frozen=True)
class Swept(Recipe):
    """A recipe whose Taylor terms are multiplied."""

    factor: float = 1.0
    fit: str = ""

    def correction_method(self) -> Correction | None:
        """The multiplied or otherwise fitted correction."""
        if self.fit:
            return FITS[self.fit]
        return ScaledTaylor(self.factor)


def parse(name: str) -> Recipe:
    """A recipe by name, or a Taylor sweep's ``name+taylor*factor``; ``@g64`` sets the group."""
    base, _, rest = name.partition("@g")
    options = {}
    if rest:
        size, plus, ending = rest.partition("+")
        options, base = {"group_size": int(size)}, base + plus + ending
    plain_base, plus, ending = base.partition("+")
    if ending in FITS:
        plain = recipe(plain_base + "+taylor", **options)
        fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(Recipe)}
        return Swept(**{**fields, "name": name}, fit=ending)
    base, star, factor = base.partition("*")
    plain = recipe(base, **options)
    if not star:
        return dataclasses.replace(plain, name=name)
    fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(Recipe)}
    return Swept(**{**fields, "name": name}, factor=float(factor))
