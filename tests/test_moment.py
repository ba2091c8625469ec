"""The second moment of queries: pooled over query heads, kept where a quantizer looks at it."""

import pytest
import torch
from attention_fakes import Draw

import videokv
from videokv.cache.moment import reads_queries, updated

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mean_of_all_queries_in_float64(dtype):
    draw = Draw(0)
    parts = [draw.normal(2, 6, tokens, 80).to(DEVICE, dtype) for tokens in (63, 200)]
    moment = None
    for part in parts:
        moment = updated(moment, part, kv_heads=3)
    rows = torch.cat([p.double().unflatten(1, (3, 2)).flatten(2, 3) for p in parts], 2)
    assert moment.count == rows.shape[2] and moment.mean.dtype == torch.float32
    want = rows.mT @ rows / rows.shape[2]
    # Sums of 526 products in float32, in whatever order: 2^-24 whenever one is added, as in a walk.
    limit = 2.0**-24 * rows.shape[2] ** 0.5 * 2
    assert float((moment.mean.double() - want).abs().max()) < limit * float(want.abs().max())


def test_quantizers_say_that_they_do_not_look():
    class Blind:
        reads_queries = False

    assert reads_queries(object()) and not reads_queries(Blind()) and not reads_queries(None)


def test_recipes_keep_what_they_look_at():
    names = (
        "rtn-2bit",
        "quarot-2bit",
        "kivi-2bit",
        "videokv-2bit",
        "quantwm-2bit",
        "rtn-2bit-psac8",
    )
    recipes = [videokv.recipe(name) for name in names]
    looks = [r.name for r in recipes if reads_queries(r.keys) or reads_queries(r.values)]
    assert looks == ["quantwm-2bit", "rtn-2bit-psac8"]
