"""Recipes: where quantizers, corrections, the cache and attention meet.

A name is read once into a ``Recipe``: ``<family>-<bits>bit[-psac<rank>][+<correction>]``, the bare
name of a fixed format, or ``bf16``. Names are derived from what the rooms register.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from videokv.attention import attend, backend_names
from videokv.cache import CachePolicy, KVCache, storage
from videokv.corrections import corrections
from videokv.protocols import Correction, Quantizer, Segment
from videokv.quantizers import Family, families

DENSE = "bf16"
USUAL_RANK = 8
SUBSPACE_MODULE = "videokv.quantizers.subspace"
REPAIRED = re.compile(r"(?P<inner>.+)-psac(?P<rank>\d+)")
POLICY_FIELDS = tuple(item.name for item in dataclasses.fields(CachePolicy))


@dataclass(frozen=True)
class Recipe:
    """One configuration of a cache, checked when it is made.

    keys, values: quantizers; None keeps that side in the model's dtype.
    correction: what is subtracted from cached scores, by name; None: nothing.
    backend: attention backend, "auto" takes the first that serves the call.
    seed: of whatever the quantizers draw (rotations, starts of clusters).
    """

    name: str
    keys: Quantizer | None
    values: Quantizer | None
    correction: str | None = None
    policy: CachePolicy = field(default_factory=CachePolicy)
    backend: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.policy, CachePolicy):
            raise ValueError(f"policy must be a CachePolicy, got {self.policy!r}")
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if not whole or not 0 <= self.seed < 2**63:
            raise ValueError(
                f"seed must be an integer of at least 0 (below 2**63), got {self.seed!r}"
            )
        if self.backend not in ("auto", *backend_names()):
            raise _unknown("backend", self.backend, ["auto", *backend_names()])
        if self.correction is None:
            return
        if self.correction not in corrections():
            raise _unknown("correction", self.correction, list(corrections()))
        if self.keys is None:
            raise ValueError(
                f"recipe {self.name!r} has dense keys, whose scores need no correction; leave "
                f"out {self.correction!r}"
            )

    def check(self, head_dim: int, *, value_head_dim: int | None = None) -> None:
        """Raise ValueError where heads of this size cannot be encoded, naming the option."""
        if self.keys is not None:
            self.keys.check(head_dim)
        if self.values is not None:
            self.values.check(head_dim if value_head_dim is None else value_head_dim)

    def correction_method(self) -> Correction | None:
        """The correction's object, or None."""
        return None if self.correction is None else corrections()[self.correction]

    def attend(
        self,
        query: Tensor,
        segments: Sequence[Segment],
        *,
        scale: float,
        causal: bool = False,
        need_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """``videokv.attention.attend`` with this recipe's backend."""
        return attend(
            query, segments, scale=scale, backend=self.backend, causal=causal, need_lse=need_lse
        )

    def new_cache(
        self,
        *,
        layers: int | None = None,
        scale: float | None = None,
        workspace_bytes: int | None = None,
        record_mass: bool = False,
        window_chunks: int | None = None,
    ) -> KVCache:
        """An empty cache of this recipe; the arguments are those of ``KVCache``.

        window_chunks: the model's own window, used where the policy names none.
        """
        recipe = self
        if window_chunks is not None and self.policy.window_chunks is None:
            policy = dataclasses.replace(self.policy, window_chunks=window_chunks)
            recipe = dataclasses.replace(self, policy=policy)
        return KVCache(
            recipe,
            layers=layers,
            scale=scale,
            workspace_bytes=workspace_bytes,
            record_mass=record_mass,
        )


def recipe(name: str | Recipe, **overrides: Any) -> Recipe:
    """The recipe of a name, with options changed.

    overrides: fields of ``Recipe`` and of ``CachePolicy`` by name; the others go to the family
    that builds the quantizers (``group_size=64``; ``span_chunks=4``: a codebook of qvg, qvg-pro or
    quantwm serves 4 chunks; ``basis_chunks=4``: so does a basis of ``-psac`` or quantwm).

    Raises:
        ValueError: unknown name (the nearest are shown), width, correction or option.

    What the policy is where nothing overrides it: the family's defaults (KIVI keeps a recent chunk
    dense).
    """
    if isinstance(name, Recipe):
        return _changed(name, overrides)
    if not isinstance(name, str):
        raise ValueError(f"a recipe is a name or a videokv.Recipe, got {name!r}")
    base, plus, correction = name.partition("+")
    if plus and correction not in corrections():
        raise _unknown("correction", correction, list(corrections()), whole=name)
    own = {item.name for item in dataclasses.fields(Recipe)} | set(POLICY_FIELDS)
    options = {key: value for key, value in overrides.items() if key not in own}
    keys, values = _quantizers(base, options)
    plain = Recipe(name, keys, values, correction or None, policy=_default_policy(base))
    return _changed(plain, {key: overrides[key] for key in overrides if key in own})


def recipes() -> list[str]:
    """The usual names: dense, every family and width, repaired or not, with every correction."""
    bases = [_base_name(family, bits) for family, bits in _formats()]
    if _subspace() is not None:
        bases += [f"{base}-psac{USUAL_RANK}" for base in bases if not _repaired(base)]
    endings = ["", *(f"+{name}" for name in corrections())]
    return [DENSE, *(base + ending for base in bases for ending in endings)]


def bits_per_element(
    name: str | Recipe, *, tokens: int, head_dim: int, value_head_dim: int | None = None
) -> float:
    """Bits an element (mean of keys and values) of chunks of ``tokens`` tokens.

    Counted from the storages of a real chunk of seeded random numbers, encoded with the queries of
    another one (so query-aware parts are there and warm); 16 for the dense recipe. Where chunks
    share a codebook or a basis, from as many chunks as it takes for each to be shared in full.

    Raises:
        ValueError: a size below 1, or the recipe cannot encode such heads.
    """
    for what, size in (("tokens", tokens), ("head_dim", head_dim)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{what} must be an integer of at least 1, got {size!r}")
    chosen = dataclasses.replace(recipe(name), correction=None, policy=CachePolicy())
    generator = torch.Generator().manual_seed(0)
    cache = chosen.new_cache(layers=1)
    sizes = (head_dim, head_dim if value_head_dim is None else value_head_dim, head_dim)
    for counted in (1, math.lcm(_period(chosen.keys), _period(chosen.values))):
        cache.reset(keep_statistics=True)  # a codebook of the first chunk would be shared too
        for chunk in range(counted):
            rows = [
                torch.randn(1, 1, tokens, size, generator=generator, dtype=torch.float32)
                for size in sizes
            ]
            key, value, query = (each.to(torch.bfloat16) for each in rows)
            cache.write(0, chunk * tokens, key, value, query * _spectrum(head_dim))
            cache.commit((chunk + 1) * tokens)
    return cache.memory().bits_per_element


def save(cache: KVCache, path: str | os.PathLike[str], *, classes: Iterable[type] = ()) -> None:
    """Write a cache to a file, whole or not at all.

    classes: your own dataclasses (quantizers, packed chunks) that it holds.

    Raises:
        ValueError: it holds something that cannot be saved.
        OSError: the file cannot be written.
    """
    storage.save(cache, path, classes=_storable() | storage.class_names(classes))


def load(
    path: str | os.PathLike[str],
    *,
    expected: str | Recipe | None = None,
    device: torch.device | str = "cpu",
    workspace_bytes: int | None = None,
    record_mass: bool = False,
    classes: Iterable[type] = (),
) -> KVCache:
    """Read a cache that ``save`` wrote; its recipe is in the file.

    expected: refuse a file of another recipe.

    Raises:
        ValueError: the file is damaged, of another format, or not of the expected recipe.
        OSError: it cannot be read.
    """
    found = storage.load(path, classes=_storable() | storage.class_names(classes))
    if expected is not None and recipe(expected) != found.recipe:
        raise ValueError(f"{path} holds a cache of {found.recipe}, expected {recipe(expected)}")
    cache: KVCache = found.recipe.new_cache(
        **found.options, workspace_bytes=workspace_bytes, record_mass=record_mass
    )
    cache.restore(found.states, length=found.length)
    return cache.to(device)


def _changed(plain: Recipe, overrides: dict[str, Any]) -> Recipe:
    own = {item.name for item in dataclasses.fields(Recipe)}
    unknown = [key for key in overrides if key not in own and key not in POLICY_FIELDS]
    if unknown:
        raise ValueError(
            f"the quantizers of recipe {plain.name!r} are made already; {unknown} cannot be "
            "changed: give the recipe by name, or other keys= and values="
        )
    changes = {key: value for key, value in overrides.items() if key in own}
    rules = {key: value for key, value in overrides.items() if key in POLICY_FIELDS}
    if rules:
        changes["policy"] = dataclasses.replace(changes.get("policy", plain.policy), **rules)
    if "correction" in changes and "name" not in changes:
        ending = changes["correction"]
        changes["name"] = plain.name.partition("+")[0] + (f"+{ending}" if ending else "")
    return dataclasses.replace(plain, **changes)


def _quantizers(base: str, options: dict[str, Any]) -> tuple[Quantizer | None, Quantizer | None]:
    """The key and value quantizers of a name without its correction."""
    if base == DENSE:
        _refuse_options(base, options, known=())
        return None, None
    known = _formats_by_name()
    if base in known:
        family, bits = known[base]
        return _build(family, bits, options)
    repaired = REPAIRED.fullmatch(base)
    subspace = _subspace()
    if repaired and subspace is not None and repaired["inner"] in known:
        family, bits = known[repaired["inner"]]
        own = {key: options[key] for key in options if key == "basis_chunks"}
        inner = {key: options[key] for key in options if key not in own}
        keys, values = _build(family, bits, inner, more=("basis_chunks",))
        return subspace(keys, int(repaired["rank"]), **own), values
    _refuse_width(base)
    raise _unknown("recipe", base, [name for name in recipes() if "+" not in name])


def _formats() -> list[tuple[Family, int | None]]:
    return [(family, bits) for family in families().values() for bits in (family.bits or (None,))]


def _formats_by_name() -> dict[str, tuple[Family, int | None]]:
    return {_base_name(family, bits): (family, bits) for family, bits in _formats()}


def _default_policy(base: str) -> CachePolicy:
    """What the family of a name (repaired or not) asks of the cache."""
    repaired = REPAIRED.fullmatch(base)
    known = _formats_by_name().get(base) or (
        _formats_by_name().get(repaired["inner"]) if repaired else None
    )
    return CachePolicy() if known is None else CachePolicy(**known[0].policy_defaults)


def _base_name(family: Family, bits: int | None) -> str:
    return family.name if bits is None else f"{family.name}-{bits}bit"


def _build(
    family: Family, bits: int | None, options: dict[str, Any], *, more: Iterable[str] = ()
) -> tuple[Quantizer, Quantizer]:
    """more: options that the caller takes, named where an unknown one is refused."""
    parameters = inspect.signature(family.build).parameters
    known = [*(name for name in parameters if name != "bits"), *more]
    _refuse_options(family.name, options, known=known)
    if bits is None and "bits" not in parameters:
        return family.build(**options)
    return family.build(bits, **options)


def _refuse_options(name: str, options: dict[str, Any], *, known: Iterable[str]) -> None:
    for option in options:
        if option not in known:
            fields = [item.name for item in dataclasses.fields(Recipe)]
            raise _unknown(f"option of {name!r}", option, [*known, *fields, *POLICY_FIELDS])


def _refuse_width(base: str) -> None:
    """Raise where the family exists and its width does not."""
    parsed = re.fullmatch(r"(?P<family>.+)-(?P<bits>\d+)bit(-psac\d+)?", base)
    family = families().get(parsed["family"]) if parsed else None
    if parsed and family is not None and int(parsed["bits"]) not in family.bits:
        widths = ", ".join(str(bits) for bits in family.bits)
        offer = f"comes in {widths} bits" if widths else f"has one width; write {family.name!r}"
        raise ValueError(f"{family.name} {offer}, got {parsed['bits']} bits in recipe {base!r}")


def _unknown(what: str, got: str, known: list[str], *, whole: str | None = None) -> ValueError:
    near = difflib.get_close_matches(got, known, n=3, cutoff=0.4) or known[:8]
    where = "" if whole is None else f" in {whole!r}"
    return ValueError(f"unknown {what} {got!r}{where}; nearest: {', '.join(near)}")


def _subspace() -> Any:
    """The wrapper that repairs keys where queries are large, or None where it is not there."""
    if importlib.util.find_spec(SUBSPACE_MODULE) is None:
        return None
    return importlib.import_module(SUBSPACE_MODULE).Subspace


def _repaired(base: str) -> bool:
    return isinstance(_quantizers(base, {})[0], _subspace())


def _period(quantizer: Any) -> int:
    """Chunks after which what they share begins anew, in a quantizer or in those it wraps."""
    if quantizer is None:
        return 1
    return math.lcm(getattr(quantizer, "period", 1), _period(getattr(quantizer, "inner", None)))


def _spectrum(head_dim: int) -> Tensor:
    """Channel weights of synthetic queries: a few directions hold most of the energy."""
    weights = torch.ones(head_dim, dtype=torch.bfloat16)
    weights[: max(1, head_dim // 16)] = 5
    return weights


@functools.lru_cache(maxsize=1)
def _storable() -> dict[str, type]:
    """Dataclasses that saved caches may hold: those of the core, the kernels and the quantizers."""
    import videokv.cache
    import videokv.kernels
    import videokv.quantizers

    families()
    rooms = [videokv.cache, videokv.kernels, videokv.quantizers]
    modules = [sys.modules[name] for name in ("videokv.tensors", "videokv.rotation", __name__)]
    for room in rooms:
        modules += _modules_of(room)
    return storage.class_names(
        cls
        for module in modules
        for cls in vars(module).values()
        if dataclasses.is_dataclass(cls)
        and isinstance(cls, type)
        and cls.__module__ == module.__name__
    )


def _modules_of(room: ModuleType) -> list[ModuleType]:
    """The loaded modules of a package; what is not loaded has made no object."""
    prefix = room.__name__ + "."
    names = [item.name for item in pkgutil.walk_packages(room.__path__, prefix)]
    return [sys.modules[name] for name in names if name in sys.modules]
