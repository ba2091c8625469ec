"""Names of recipes, their options, and bits that are counted."""

import importlib.util

import pytest
import torch

import videokv
from videokv import recipes as room
from videokv.cache import CachePolicy
from videokv.corrections import corrections
from videokv.quantizers import families
from videokv.quantizers.groupwise import Groupwise
from videokv.quantizers.rotated import Rotated
from videokv.tensors import GroupFormat

BASES = [name for name in room.recipes() if "+" not in name]


def test_names_are_derived_from_what_is_registered():
    names = room.recipes()
    assert names[0] == "bf16" and len(names) == len(set(names))
    for family in families().values():
        for bits in family.bits:
            for ending in ["", *(f"+{name}" for name in corrections())]:
                assert f"{family.name}-{bits}bit{ending}" in names


@pytest.mark.parametrize("name", room.recipes())
def test_every_usual_name_parses(name):
    parsed = videokv.recipe(name)
    assert parsed.name == name
    assert (parsed.correction or "") == name.partition("+")[2]
    assert parsed == videokv.recipe(name)
    assert videokv.recipe(parsed) == parsed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rtm-2bit", "unknown recipe 'rtm-2bit'; nearest: rtn-2bit"),
        ("rtn-5bit", "rtn comes in 2, 3, 4, 8 bits, got 5 bits"),
        ("rtn-2bit+tailor", "unknown correction 'tailor' in 'rtn-2bit.tailor'; nearest: taylor"),
        ("rtn-2bit+", "unknown correction ''"),
        ("bf16+taylor", "dense keys"),
        ("rtn", "unknown recipe 'rtn'"),
        ("", "unknown recipe ''"),
        (None, "a recipe is a name"),
    ],
)
def test_unknown_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        videokv.recipe(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grup_size": 3}, "grup_size.*nearest: group_size"),
        ({"window_chunks": -3}, "window_chunks"),
        ({"backend": "sdpq"}, "unknown backend 'sdpq'; nearest: sdpa"),
        ({"correction": "tailor"}, "unknown correction"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"policy": 3}, "policy"),
        ({"group_size": 0}, "group_size"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        videokv.recipe("rtn-2bit", **options)


def test_options_reach_their_places():
    made = videokv.recipe(
        "rtn-2bit", group_size=64, seed=3, sink_chunks=1, backend="eager", correction="taylor"
    )
    assert made.keys.format == GroupFormat(2, 64)
    assert made.policy == CachePolicy(sink_chunks=1)
    assert (made.seed, made.backend, made.name) == (3, "eager", "rtn-2bit+taylor")
    changed = videokv.recipe(made, recent_chunks=2, correction=None)
    assert changed.policy == CachePolicy(sink_chunks=1, recent_chunks=2)
    assert changed.name == "rtn-2bit"
    with pytest.raises(ValueError, match="made already"):
        videokv.recipe(made, group_size=32)
    with pytest.raises(ValueError, match="option of 'bf16'"):
        videokv.recipe("bf16", group_size=32)


def test_a_recipe_of_ones_own():
    keys = Rotated(Groupwise(GroupFormat(3, 64)))
    own = videokv.Recipe("own", keys, Groupwise(GroupFormat(2, 64)), "calibrated")
    bits = videokv.bits_per_element(own, tokens=64, head_dim=128)
    assert bits == pytest.approx((3 + 2) / 2 + 24 / 64)
    own.check(128)
    with pytest.raises(ValueError, match="group_size 64 does not divide head_dim 80"):
        own.check(80)
    own.check(64, value_head_dim=128)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("bf16", 16), ("rtn-2bit", 2.75), ("rtn-3bit", 3.75), ("rtn-8bit", 9), ("quarot-4bit", 4.75)],
)
def test_bits_are_counted(name, bits):
    assert videokv.bits_per_element(name, tokens=40, head_dim=64) == bits


@pytest.mark.parametrize("name", BASES)
def test_bits_exist_for_every_base(name):
    before = torch.get_rng_state()
    bits = videokv.bits_per_element(name, tokens=64, head_dim=128)
    assert 2 <= bits <= 64
    assert bits == videokv.bits_per_element(name, tokens=64, head_dim=128)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("sizes", [{"tokens": 0}, {"tokens": 2.5}, {"head_dim": 0}])
def test_bits_refuse_sizes_below_one(sizes):
    with pytest.raises(ValueError, match=f"{next(iter(sizes))} must be an integer"):
        videokv.bits_per_element("rtn-2bit", **{"tokens": 8, "head_dim": 32, **sizes})


@pytest.mark.parametrize("name", ["kivi-2bit", "kivi-4bit+taylor", "kivi-2bit-psac8"])
def test_kivi_keeps_a_recent_chunk_unless_told_otherwise(name):
    assert videokv.recipe(name).policy == CachePolicy(recent_chunks=1)
    assert videokv.recipe(name, sink_chunks=2).policy == CachePolicy(2, 1)
    assert videokv.recipe(name, recent_chunks=0).policy == CachePolicy()
    assert videokv.recipe(name, policy=CachePolicy()).policy == CachePolicy()


def test_other_families_keep_the_plain_policy():
    for name in ("bf16", "rtn-2bit", "quarot-2bit"):
        assert videokv.recipe(name).policy == CachePolicy()


def test_policy_defaults_are_fields_of_the_policy():
    for family in families().values():
        CachePolicy(**family.policy_defaults)


@pytest.mark.parametrize("wrong", [True, 0, 2.0, "32"])
def test_a_group_is_a_number_of_elements(wrong):
    with pytest.raises(ValueError, match="group_size must be a positive integer"):
        GroupFormat(2, wrong)


def test_the_models_window_is_used_where_the_recipe_has_none():
    assert videokv.recipe("rtn-2bit").new_cache(window_chunks=4).recipe.policy.window_chunks == 4
    own = videokv.recipe("rtn-2bit", window_chunks=2)
    assert own.new_cache(window_chunks=4).recipe.policy.window_chunks == 2


def test_subspace_wraps_any_keys():
    if importlib.util.find_spec(room.SUBSPACE_MODULE) is None:
        with pytest.raises(ValueError, match="unknown recipe 'rtn-2bit-psac8'"):
            videokv.recipe("rtn-2bit-psac8")
        return
    made = videokv.recipe("quarot-2bit-psac4+calibrated")
    assert made.keys.rank == 4 and isinstance(made.keys.inner, Rotated)
    assert not hasattr(made.values, "rank")
    with pytest.raises(ValueError, match="rtn comes in 2, 3, 4, 8 bits"):
        videokv.recipe("rtn-5bit-psac8")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qvg-2bit", {"centroids": "8"}),
        ("qvg-2bit", {"centroids": 8.0}),
        ("qvg-2bit", {"centroids": True}),
        ("qvg-2bit", {"iterations": 2.5}),
        ("qvg-2bit", {"stages": "1"}),
        ("qvg-2bit", {"symmetric": "no"}),
        ("rtn-2bit", {"symmetric": "no"}),
        ("quantwm-2bit", {"rank": None}),
        ("quantwm-2bit", {"rank": 2.5}),
        ("quantwm-2bit", {"candidates": "4"}),
        ("fp8", {"group_size": "32"}),
        ("mxfp4", {"noise_group_size": True}),
        ("quarot-2bit", {"rotate_v": "no"}),
        ("kivi-2bit", {"fp16_scales": "no"}),
        ("quarot-2bit", {"seed": 2**70}),
    ],
)
def test_options_of_wrong_kinds_are_named(name, options):
    (option,) = options
    with pytest.raises(ValueError, match=f"{option} must be"):
        videokv.recipe(name, **options)
