"""Recipes of the sweeps: options, multipliers on Taylor's terms, other fits."""

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
    """A recipe by name, with options after ``@`` and, for a Taylor sweep, a factor after ``*``.

    ``rtn-2bit@group_size=64+taylor*1.5``, ``kivi-2bit@recent_chunks=0``,
    ``quarot-2bit@backend=triton-fp8+taylor``.
    """
    base, plus, ending = name.partition("+")
    base, _, told = base.partition("@")
    ending, _, factor = ending.partition("*")
    pairs = (pair.split("=") for pair in told.split("@") if pair)
    options: dict = {key: int(value) if value.isdigit() else value for key, value in pairs}
    if ending in FITS:
        plain = recipe(base + "+taylor", **options)
    else:
        plain = recipe(base + plus + ending, **options)
    if ending not in FITS and not factor:
        return dataclasses.replace(plain, name=name)
    fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(Recipe)}
    fit = ending if ending in FITS else ""
    return Swept(**{**fields, "name": name}, factor=float(factor or 1), fit=fit)
