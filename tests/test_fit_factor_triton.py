"""The kernel that fits factors against Newton's steps in float64."""

import pytest
import torch
from attention_fakes import Draw

from videokv.kernels.fit_factor import _self_check, far_pairs, reference

pytest.importorskip("triton")
from videokv.kernels.fit_factor import triton as kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.float32]
if DEVICE == "cuda":  # the interpreter multiplies BF16 wrongly
    DTYPES.append(torch.bfloat16)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    if DEVICE == "cpu":  # the interpreter runs them one after the other
        monkeypatch.setattr(kernel, "PROGRAMS", 6)


def make(tokens, *, size=64, group=1, features=4, dtype=torch.float16, rows=40, heads=2, wide=True):
    draw = Draw(tokens, torch.float64)
    rows = min(rows, tokens)
    queries, true = draw.normal(1, heads * group, rows, size), draw.normal(1, heads, tokens, size)
    noisy = true + 0.4 * draw.normal(1, heads, tokens, size)
    phi = queries.unflatten(-1, (features, -1)).square().sum(-1) / (24 * size)
    shape = (1, heads, tokens, features) if wide else (1, heads, 1, 1)
    weights = 12 * 0.16 * (0.5 + torch.rand(shape, generator=draw.generator))
    queries, true = queries.to(DEVICE, dtype), true.to(DEVICE, dtype)
    return (
        queries,
        true,
        noisy.to(DEVICE, torch.float32),
        phi.to(DEVICE, torch.float32),
        weights.to(DEVICE, torch.float32),
    )


def off(*tensors, scale=0.125):
    got = kernel.fit_factor(*tensors, scale=scale)
    want = reference.fit_factor(*(t.double() for t in tensors), scale=scale)
    assert got.shape == want.shape and got.dtype == torch.float32
    return float((got.double() - want).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 63, 130])
def test_the_root_in_float64(tokens, dtype):
    assert off(*make(tokens, dtype=dtype)) < 1e-4


def test_a_long_chunk():
    assert off(*make(4680 if DEVICE == "cuda" else 500, heads=1, rows=128)) < 1e-4


@pytest.mark.parametrize("features", [1, 20, 40])
def test_any_number_of_features(features):
    assert off(*make(100, size=80, features=features)) < 1e-4


def test_rows_of_all_query_heads():
    assert off(*make(90, group=3)) < 1e-4


def test_weights_for_all_tokens_and_keys_that_are_parts():
    queries, true, noisy, phi, weights = make(90, wide=False)
    both = torch.cat([true, noisy.to(true.dtype)], 3)
    true, noisy = both[..., :64], both[..., 64:]  # of one dtype, too
    assert off(queries, true, noisy, phi, weights) < 1e-4


@pytest.mark.parametrize("scale", [0.02, 0.5])
def test_flat_and_peaked_attention(scale):
    assert off(*make(130), scale=scale) < 2e-4


def test_factors_stay_in_their_range():
    queries, true, noisy, phi, weights = make(40)
    for factor, size in ((-1.0, 0.5), (2.0, 2.0)):
        for weight in (0.0, 1e-9):
            got = kernel.fit_factor(
                queries, true, true.float() * size, phi, weights * weight, scale=0.125
            )
            assert bool((got == factor).all())


def test_results_do_not_depend_on_the_split(monkeypatch):
    monkeypatch.setattr(kernel, "PROGRAMS", 5)
    tensors = make(150, heads=1)
    whole = kernel.fit_factor(*tensors, scale=0.125)
    again = kernel.fit_factor(*tensors, scale=0.125)
    monkeypatch.setattr(kernel, "PROGRAMS", 1)
    assert torch.equal(whole, again)
    assert float((kernel.fit_factor(*tensors, scale=0.125) - whole).abs().max()) < 1e-5


def test_heads_sit_out_once_their_interval_is_narrow(monkeypatch):
    """One head after the first pass, the other, whose errors are large, later."""
    queries, true, noisy, phi, weights = make(90)
    noisy[:, 1] += 3 * (noisy - true.float())[:, 1]
    weights[:, 1] *= 40 * torch.rand(90, 1, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    tensors = (queries, true, noisy, phi, weights)
    found = {}
    for narrow in (0.0, kernel.NARROW):
        monkeypatch.setattr(kernel, "NARROW", narrow)
        found[narrow] = kernel.fit_factor(*tensors, scale=0.125)
        monkeypatch.setattr(kernel, "PASSES", 1)
        first = kernel.fit_factor(*tensors, scale=0.125)
        monkeypatch.setattr(kernel, "PASSES", 3)
        assert narrow == 0 or torch.equal(first[:, 0], found[narrow][:, 0])
        assert not torch.equal(first[:, 1], found[narrow][:, 1])
    exact, quick = found.values()
    assert float((exact - quick).abs().max()) < kernel.NARROW
    assert off(*tensors) < 2e-4


def test_the_self_check_passes():
    for features in (4, 32):
        assert _self_check(torch.float16, 64, features, torch.device(DEVICE), tokens=130) is None


def test_far_pairs_are_an_integer_comparison():
    for tokens in (1, 2, 3, 63, 999, 4680, 30_000):
        rows = min(128, tokens)
        place = (2 * torch.arange(rows) + 1) * tokens // (2 * rows)
        far = 3 * (place[:, None] - torch.arange(tokens)).abs() >= tokens
        assert torch.equal(far | ~far.any(-1, keepdim=True), far_pairs(rows, tokens))


def test_a_batch_row_gets_what_it_would_get_alone():
    rows = [make(tokens, group=2) for tokens in (90, 90)]
    rows[1] = tuple(1.5 * tensor for tensor in rows[1])
    both = kernel.fit_factor(*map(torch.cat, zip(*rows, strict=True)), scale=0.125)
    alone = torch.cat([kernel.fit_factor(*row, scale=0.125) for row in rows])
    assert torch.equal(both, alone) and not torch.equal(both[0], both[1])
