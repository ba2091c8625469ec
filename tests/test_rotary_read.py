"""Keys cached before rotary embedding: turned as they are decoded, or decoded and then turned."""

import pytest
import torch

import videokv
from videokv.adapters import rotary
from videokv.adapters.rows import Piece
from videokv.adapters.store import attend_pieces
from videokv.kernels.reconstruct import Rope

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ["bf16", "rtn-2bit", "rtn-2bit+taylor", "quarot-2bit", "qvg-2bit+measured", "quantwm-2bit"]
TOKENS, SIZE = 24, 64


def rows(tokens, *, heads=2, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, heads, SIZE, generator=generator).to(DEVICE, dtype)


def model_rope(x, *, first=5):
    """As Wan's: complex products in float64, positions counted from ``first``; [B, n, H, D]."""
    rates = 100.0 ** -(torch.arange(SIZE // 2, device=x.device, dtype=torch.float64) / 32)
    angles = (torch.arange(x.shape[1], device=x.device) + first)[:, None] * rates
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)


def filled(name, *, dtype=torch.float32):
    """A sink, two packed chunks and a tail that is not committed."""
    cache = videokv.recipe(name, sink_chunks=1).new_cache(layers=1)
    for chunk in range(4):
        key, value, query = (
            rows(TOKENS, heads=heads, seed=3 * chunk + number, dtype=dtype).transpose(1, 2)
            for number, heads in enumerate((2, 2, 4))
        )
        cache.write(0, chunk * TOKENS, key, value, query)
        if chunk < 3:
            cache.commit((chunk + 1) * TOKENS)
    return cache


# The sink, packed chunks cut at both ends, dense rows in between, and the tail.
PIECES = (
    Piece(TOKENS, token=0),
    Piece(TOKENS + 7, token=TOKENS + 5),
    Piece(6, dense=rows(6, seed=90)),
    Piece(TOKENS + 2, token=3 * TOKENS - 2),
)


@pytest.mark.parametrize("name", NAMES)
def test_one_pass_gives_the_same_keys_and_attention(name, monkeypatch):
    cache = filled(name)
    found = []
    for together in (False, True):
        monkeypatch.setattr(rotary, "worth_gathering", lambda device, on=together: on)
        pieces = rotary.rotated(cache, 0, PIECES, model_rope)
        values = tuple(Piece(p.count, token=p.token) if p.token is not None else p for p in PIECES)
        query = rows(9, heads=4, seed=70).transpose(1, 2)
        found.append((pieces, attend_pieces(cache, 0, query, pieces, values)))
    (apart, want), (joint, got) = found
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert [p.count for p in joint] == [p.count for p in apart]
    for one, other in zip(joint, apart, strict=True):
        torch.testing.assert_close(one.dense, other.dense, rtol=1e-5, atol=1e-5)
        for term, same in zip(one.noise, other.noise, strict=True):
            assert torch.equal(term.weights, same.weights)
    if name == "bf16":
        assert all(torch.equal(a.dense, b.dense) for a, b in zip(joint, apart, strict=True))


def test_only_keys_are_decoded(monkeypatch):
    cache, pieces = filled("rtn-2bit"), (Piece(2 * TOKENS, token=TOKENS),)
    calls = []
    for together in (False, True):
        monkeypatch.setattr(rotary, "worth_gathering", lambda device, on=together: on)
        before = cache.decode_calls
        rotary.rotated(cache, 0, pieces, model_rope)
        calls.append(cache.decode_calls - before)
    assert calls == [4, 2]


def test_the_table_of_a_models_function():
    table = rotary.table_of(
        model_rope, batch=2, tokens=9, head_dim=SIZE, device=torch.device(DEVICE)
    )
    x = rows(9, seed=4)
    turned = table.turn(x.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(turned, model_rope(x), rtol=1e-5, atol=1e-5)


def test_a_correction_that_does_not_survive_is_refused(monkeypatch):
    monkeypatch.setattr(rotary, "worth_gathering", lambda device: True)
    with pytest.raises(ValueError, match="rotated or projected basis"):
        rotary.rotated(filled("quarot-2bit+taylor"), 0, PIECES, model_rope)
    with pytest.raises(ValueError, match="never written"):
        rotary.rotated(filled("rtn-2bit"), 0, (*PIECES, Piece(3)), model_rope)


@pytest.mark.parametrize("workspace_bytes", [None, 1 << 24])
def test_one_side_of_a_span(workspace_bytes):
    cache = filled("rtn-2bit+taylor")
    cache._workspace.budget_bytes = workspace_bytes
    current = [rows(3, heads=heads, seed=heads).transpose(1, 2) for heads in (4, 2, 2)]
    cache.attend(0, *current)  # keeps decoded chunks where there is a budget
    span = (TOKENS + 3, 3 * TOKENS + 4)
    want = cache.view(0, [span], tail=True)
    for name in ("key", "value"):
        got = cache.side(0, name, span, tail=True)
        for (held, noise), segment in zip(got, want, strict=True):
            assert torch.equal(held, segment.keys if name == "key" else segment.values)
            assert len(noise) == (len(segment.noise) if name == "key" else 0)
    with pytest.raises(ValueError, match="dropped or never written"):
        cache.side(0, "key", span)
    with pytest.raises(ValueError, match="dropped or never written"):
        cache.side(0, "key", (0, 99 * TOKENS), tail=True)
    table = torch.ones(span[1] - span[0], SIZE // 2, device=DEVICE)
    with pytest.raises(ValueError, match="rope turns keys"):
        cache.side(0, "value", span, rope=Rope(table, table), tail=True)
    cache.forget(TOKENS + 10)
    with pytest.raises(ValueError, match="dropped or never written"):
        cache.side(0, "key", span, tail=True)
