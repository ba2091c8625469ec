"""videokv's own quantizer: unbiased codes, a zero among the centroids, the bits of its recipes."""

from __future__ import annotations

import pytest
import torch

from videokv.corrections import corrections
from videokv.protocols import EncodeContext
from videokv.quantizers.unbiased import LONG_CHUNK, Unbiased, fit_centres, unbiased_codes
from videokv.recipes import bits_per_element, recipe

KEYS = EncodeContext(layer=3, role="key", seed=1)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def laplace(*shape: int) -> torch.Tensor:
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(1)) - 0.5
    return -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.4999999))


def restored(codes: torch.Tensor, steps: torch.Tensor, bits: int) -> torch.Tensor:
    return (codes.double() - ((1 << bits) - 1) / 2) * steps.double().unsqueeze(-1)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("size", [1.0, 1e-12, 1e12])
@pytest.mark.parametrize("law", [randn, laplace])
def test_projection_on_the_group_is_the_group(bits, size, law):
    y = law(3, 2, 63, 2, 40) * size
    back = restored(*unbiased_codes(y, bits=bits), bits)
    square = y.double().square().sum(-1)
    assert float(((back * y).sum(-1) / square - 1).abs().max()) < 1e-5


@pytest.mark.parametrize(("bits", "limit"), [(2, 0.138), (3, 0.041), (4, 0.0125)])
def test_error_on_gaussian_numbers(bits, limit):
    """The best uniform grid has .1188, .0374, .0115 of the variance; unbiased: D / (1 - D)."""
    y = randn(1, 1, 2000, 1, 128)
    error = restored(*unbiased_codes(y, bits=bits), bits) - y
    assert float(error.square().mean()) < limit


def test_zero_groups_have_no_step():
    y = randn(1, 1, 4, 2, 16)
    y[0, 0, 1, 1] = 0
    _, steps = unbiased_codes(y, bits=2)
    assert float(steps[0, 0, 1, 1]) == 0 and int((steps == 0).sum()) == 1


def test_stored_steps_keep_their_precision_over_twelve_octaves():
    x = randn(1, 1, 200, 64) * torch.logspace(-3, 0, 200)[:, None]
    chunk = Unbiased(4).encode(x, KEYS)
    y = chunk.rotation.apply(x - chunk.centres.gather()).unflatten(-1, (1, -1))
    _, ideal = unbiased_codes(y, bits=4)
    ratio = chunk.real_steps() / ideal
    assert float(ratio.log2().abs().max()) < 0.5 / 20 + 1e-4


@pytest.mark.parametrize("head_dim", [63, 64, 80, 128, 256])
@pytest.mark.parametrize("tokens", [1, 2, 63, 1000])
def test_every_shape(head_dim, tokens):
    x = randn(1, 2, tokens, head_dim)
    chunk = Unbiased(3).encode(x, KEYS)
    error = chunk.decode(torch.float32) - x
    assert float(error.square().sum() / x.square().sum()) < 0.06
    (term,) = chunk.noise()
    assert term.query_map.group_size * term.weights.shape[3] == head_dim


def test_sinks_near_zero_stay_near_zero():
    """One small key among many that share a large mean, as attention sinks are."""
    x = randn(1, 1, 300, 64) + 10 * randn(1, 1, 1, 64, seed=4)
    x[0, 0, 0] *= 0.01
    centres = fit_centres(x, bits=2, iterations=3, seed=0)
    assert bool((centres.gather()[0, 0, 0].abs() < 1).all())
    back = Unbiased(2).encode(x, KEYS).decode(torch.float32)
    own = (back - x)[0, 0, 0].norm() / x[0, 0, 0].norm()
    assert float(own) < 1


def test_centroids_take_what_tokens_share():
    shared = 5 * randn(1, 2, 3, 128, seed=2).repeat_interleave(50, 2)
    x = shared + randn(1, 2, 150, 128)
    error = Unbiased(2).encode(x, KEYS).decode(torch.float32) - x
    assert float(error.square().mean()) < 0.16  # of noise alone, not of 26 times as much


def test_long_chunks_have_more_centroids():
    for tokens, size, centroids in ((63, 128, 3), (LONG_CHUNK, 64, 3), (LONG_CHUNK, 128, 15)):
        chunk = Unbiased(2).encode(randn(1, 1, tokens, size), KEYS)
        assert chunk.centres.table.shape[2] == centroids


def test_scores_are_unbiased_and_the_rest_is_calibrated_away():
    keys, queries = randn(1, 2, 1000, 128), randn(1, 4, 128, 128, seed=1) * 2
    scale = 128**-0.5
    packed = Unbiased(2).encode(keys, KEYS)
    wide = lambda k: k.repeat_interleave(2, 1)  # noqa: E731
    true = queries @ wide(keys).mT * scale
    noisy = queries @ wide(packed.decode(torch.float32)).mT * scale
    slope = float((true * noisy).sum() / true.square().sum())
    assert abs(slope - 1) < 0.01
    correction = corrections()["calibrated"]
    factors = correction.fit(packed, keys, queries, scale=scale)
    (term,) = correction.noise(packed, factors)
    weights = wide(term.weights)
    bias = term.query_map.features(queries, scale=scale) @ weights.mT
    raw = float((noisy.logsumexp(-1) - true.logsumexp(-1)).mean())
    left = float(((noisy - bias).logsumexp(-1) - true.logsumexp(-1)).mean())
    assert raw > 0.1 and abs(left) < 0.1 * raw


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [324, 512, 1024, 2048, 4680])
def test_counted_bits(head_dim, tokens):
    for name, limit in (("videokv-2bit", 2.75), ("videokv-2bit-small", 2.35)):
        assert bits_per_element(name, tokens=tokens, head_dim=head_dim) <= limit


def test_names_and_options():
    assert recipe("videokv-2bit+calibrated").keys == Unbiased(3)
    assert recipe("videokv-2bit-small", label_bits=2).keys == Unbiased(2, label_bits=2)
    assert recipe("videokv-2bit", key_bits=4, value_bits=3).values == Unbiased(3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bits": 5}, "bits"),
        ({"bits": 2, "label_bits": 5}, "label_bits"),
        ({"bits": 2, "group_size": 0}, "group_size"),
        ({"bits": 2, "iterations": 0}, "iterations"),
        ({"bits": 3.0}, "bits"),
        ({"bits": [3]}, "bits"),
        ({"bits": 2, "label_bits": 2.0}, "label_bits"),
        ({"bits": 2, "group_size": "64"}, "group_size"),
        ({"bits": 2, "group_size": True}, "group_size"),
        ({"bits": 2, "iterations": 2.5}, "iterations"),
    ],
)
def test_wrong_options_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        Unbiased(**options)


def test_groups_must_divide_the_head_and_numbers_be_usable():
    with pytest.raises(ValueError, match="group_size 48.*head_dim 64"):
        Unbiased(2, 48).encode(randn(1, 1, 4, 64), KEYS)
    with pytest.raises(ValueError, match="layer 3 reach"):
        Unbiased(2).encode(randn(1, 1, 4, 64) * 1e20, KEYS)
