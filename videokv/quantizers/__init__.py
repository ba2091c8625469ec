"""Quantizers: one file a method. A file that registers a family here is all it takes: recipes, the
contract suite, the command line and the benchmarks find it by themselves.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from videokv.protocols import Quantizer

Build = Callable[..., tuple[Quantizer, Quantizer]]


@dataclass(frozen=True)
class Family:
    """A named method: ``build(bits, **options)`` gives the key and the value quantizer.

    bits: widths that recipes ``<name>-<bits>bit`` offer; () for a fixed-width format, whose
    recipe is the bare name.
    policy_defaults: fields of the cache's policy that are part of the method (a recent window that
    stays dense); whoever makes a recipe may override them.
    """

    name: str
    build: Build
    bits: tuple[int, ...]
    summary: str
    policy_defaults: Mapping[str, int] = field(default_factory=dict)


_families: dict[str, Family] = {}


def register(
    name: str,
    *,
    bits: tuple[int, ...],
    summary: str,
    policy_defaults: Mapping[str, int] | None = None,
) -> Callable[[Build], Build]:
    """Decorate the function that builds a family's (key, value) quantizers."""

    def decorate(build: Build) -> Build:
        if name in _families and _families[name].build.__module__ != build.__module__:
            raise ValueError(f"two quantizer files register the name {name!r}")
        _families[name] = Family(name, build, bits, summary, dict(policy_defaults or {}))
        return build

    return decorate


def families() -> dict[str, Family]:
    """All methods by name (imports every file of this folder once)."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_families.items()))
