"""On a GPU: odd head sizes and lengths, permuted inputs, storages past 2^31 elements."""

import pytest
import torch

from videokv.attention import attend
from videokv.kernels.copy_rows import copy_rows
from videokv.kernels.reconstruct import decode_into
from videokv.protocols import EncodeContext, Segment
from videokv.recipes import recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RECIPES = (
    "rtn-2bit+taylor",
    "quarot-2bit+calibrated",
    "kivi-2bit",
    "qvg-2bit",
    "quantwm-2bit+calibrated",
    "videokv-2bit+calibrated",
)
BF16 = torch.bfloat16


def draw(*shape, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(BF16)


def permuted(*shape, seed):
    """[B, H, T, D] as a model has it: heads beside channels."""
    batch, heads, tokens, size = shape
    return draw(batch, tokens, heads, size, seed=seed).transpose(1, 2)


@pytest.mark.parametrize("size", [64, 72, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("name", RECIPES)
def test_any_head_size_and_length_or_one_clear_error(name, size):
    lengths = (1, 127, 129, 1025)
    try:
        cache = recipe(name).new_cache(layers=1)
        cache.write(0, 0, *(permuted(1, 2, 8, size, seed=0) for _ in range(3)))
    except ValueError as error:
        assert str(size) in str(error)
        return
    for batch in (1, 2, 3):
        cache = recipe(name).new_cache(layers=1)
        start = 0
        for number, tokens in enumerate(lengths):
            k, v = (permuted(batch, 2, tokens, size, seed=10 * number + i) for i in (1, 2))
            cache.write(0, start, k, v, permuted(batch, 4, tokens, size, seed=number))
            start += tokens
            cache.commit(start)
        q = permuted(batch, 4, 131, size, seed=5)
        k, v = (permuted(batch, 2, 131, size, seed=i) for i in (6, 7))
        got = cache.attend(0, q, k, v).double()
        past = [Segment(s.keys.double(), s.values.double(), s.noise) for s in cache.view(0)]
        want = attend(q.double(), [*past, Segment(k.double(), v.double())], backend="eager")[0]
        assert float((got - want).norm() / want.norm()) < 1e-2, (batch, size)


@pytest.mark.parametrize("name", RECIPES)
def test_a_chunk_of_99866_tokens(name):
    heads, tokens = 2, 99866
    cache = recipe(name, **({"recent_chunks": 0} if name.startswith("kivi") else {})).new_cache(
        layers=1
    )
    k, v, q = (permuted(1, heads, tokens, 128, seed=i) for i in range(3))
    cache.write(0, 0, k, v, q)
    cache.commit(tokens)
    (past,) = cache.view(0)
    one = [Segment(past.keys[:, 1:].double(), past.values[:, 1:].double(), last_head(past.noise))]
    q, k, v = (permuted(1, heads, 70, 128, seed=i) for i in (4, 5, 6))
    got = cache.attend(0, q, k, v)[:, 1:].double()
    current = Segment(k[:, 1:].double(), v[:, 1:].double())
    want = attend(q[:, 1:].double(), [*one, current], backend="eager")[0]
    assert float((got - want).norm() / want.norm()) < 1e-2


def last_head(noise):
    """The terms of head 1."""
    from dataclasses import replace

    found = []
    for term in noise:
        basis = term.query_map.basis
        query_map = term.query_map if basis is None else replace(term.query_map, basis=basis[:, 1:])
        found.append(type(term)(term.weights[:, 1:], query_map, term.exact))
    return tuple(found)


def encoded(name, x, side="keys"):
    moment = torch.eye(x.shape[3], device="cuda").expand(x.shape[0], x.shape[1], -1, -1)
    context = EncodeContext(layer=0, role="key", query_moment=moment.contiguous(), query_count=100)
    return getattr(recipe(name), side).encode(x, context)


@pytest.mark.parametrize("name", ["rtn-2bit", "quarot-2bit", "qvg-2bit", "videokv-2bit"])
def test_more_than_2_to_the_31_elements(name):
    """The last of 66 heads, which begins beyond element 2^31, has the bits that it has alone."""
    heads, tokens, size = 66, 262_144, 128
    x = torch.empty(1, heads, tokens, size, dtype=BF16, device="cuda")
    assert x.numel() > 2**31
    one = draw(1, 1, tokens, size, seed=3)
    x[:] = one
    chunk, alone = encoded(name, x), encoded(name, one)
    rows = torch.full((1, heads, tokens, size), torch.nan, dtype=BF16, device="cuda")
    decode_into(chunk, rows)
    want = alone.decode(BF16)
    assert torch.equal(rows[:, -1:], want) and torch.equal(rows[:, :1], want)
    del x
    target = torch.empty_like(rows)
    copy_rows([(rows, target)])
    assert torch.equal(target[:, -1], rows[:, -1]) and torch.equal(target[:, 0], rows[:, 0])


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_attention_on_rows_beyond_2_to_the_31(backend):
    heads, room, tokens, size = 33, 600_000, 700, 128
    store = torch.empty(1, heads, room, size, dtype=BF16, device="cuda")
    assert store.numel() > 2**31
    keys, values = store[:, :, :tokens], store[:, :, tokens : 2 * tokens]
    keys[:], values[:] = draw(1, heads, tokens, size, seed=1), draw(1, heads, tokens, size, seed=2)
    q = draw(1, heads, 50, size, seed=3)
    got = attend(q, [Segment(keys, values, packed=True)], backend=backend)[0].double()
    want = attend(q.double(), [Segment(keys.double(), values.double())], backend="eager")[0]
    assert float((got - want).norm() / want.norm()) < 1e-2


@pytest.mark.parametrize("name", ["rtn-2bit", "quarot-2bit", "qvg-2bit", "quantwm-2bit"])
def test_encoding_a_view_of_a_storage_beyond_2_to_the_31(name):
    heads, room, tokens, size = 33, 600_000, 1025, 128
    store = torch.empty(1, heads, room, size, dtype=BF16, device="cuda")
    x = store[:, :, 7 : 7 + tokens]
    x[:] = draw(1, heads, tokens, size, seed=1)
    assert torch.equal(encoded(name, x).decode(BF16), encoded(name, x.contiguous()).decode(BF16))
