"""A recipe by name with options changed, under a label of its own: what a study puts in a row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from videokv.recipes import Recipe

REFERENCE = "bf16"


@dataclass(frozen=True)
class Variant:
    """label: in tables and results. base: a recipe's name. options: overrides of ``recipe()``."""

    label: str
    base: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def path_name(self) -> str:
        """The label as the name of a folder."""
        return path_name(self.label)

    def recipe(self) -> Recipe:
        """Raises ValueError naming the option or the nearest recipe."""
        from videokv.recipes import recipe

        return recipe(self.base, **dict(self.options))


def path_name(label: str) -> str:
    """The folder in which the frames of a variant with that label are kept."""
    return label.replace("/", "_").replace(" ", "_")


def variant(base: str, label: str | None = None, **options: Any) -> Variant:
    """``base`` with options; the label is the base and the options unless given."""
    if label is None:
        told = " ".join(f"{name}={value}" for name, value in options.items())
        label = f"{base} {told}".strip()
    return Variant(label, base, tuple(options.items()))


def checked(variants: Iterable[Variant]) -> tuple[Variant, ...]:
    """The reference first, each label once, every recipe buildable.

    Raises ValueError where two different variants share a label or a recipe is wrong.
    """
    found: dict[str, Variant] = {REFERENCE: variant(REFERENCE)}
    for item in variants:
        if found.setdefault(item.label, item) != item:
            raise ValueError(f"two recipes share the label {item.label!r}; give another")
        item.recipe()
    return tuple(found.values())
