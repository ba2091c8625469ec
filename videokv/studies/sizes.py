"""Bits per element of every usual recipe, counted from chunks that are really encoded."""

from __future__ import annotations

from dataclasses import dataclass

from videokv.studies import rollout as seam

BF16_BITS = 16


@dataclass(frozen=True)
class RecipeSize:
    """bits_per_element and ratio (16 bits over them) are None where the recipe refuses chunks of
    this shape; refusal says why."""

    recipe: str
    bits_per_element: float | None
    refusal: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.bits_per_element is None else BF16_BITS / self.bits_per_element

    def as_json(self) -> dict[str, object]:
        figures: dict[str, object] = {
            "recipe": self.recipe,
            "bits_per_element": self.bits_per_element,
            "ratio": self.ratio,
        }
        return {**figures, "refusal": self.refusal} if self.refusal else figures


def recipe_sizes(*, tokens: int, head_dim: int) -> tuple[RecipeSize, ...]:
    """One entry a usual recipe.

    A correction packs nothing: a recipe with one has the bits of its base. (The few factors that
    some corrections store are in ``held_bytes`` of a real cache.)
    """
    if tokens < 1 or head_dim < 1:
        raise ValueError(f"tokens and head-dim must be 1 or more, got {tokens} and {head_dim}")
    names = seam.recipe_names()
    bases = {
        base: _count(base, tokens=tokens, head_dim=head_dim)
        for base in dict.fromkeys(name.partition("+")[0] for name in names)
    }
    counted = [(name, bases[name.partition("+")[0]]) for name in names]
    return tuple(RecipeSize(name, base.bits_per_element, base.refusal) for name, base in counted)


def _count(name: str, *, tokens: int, head_dim: int) -> RecipeSize:
    try:
        return RecipeSize(name, seam.count_bits(name, tokens=tokens, head_dim=head_dim))
    except ValueError as refusal:
        return RecipeSize(name, None, str(refusal))
