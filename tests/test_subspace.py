"""QuantWM's repair (PSAC): what it stores, what it repairs, and the noise that stays."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from videokv.kernels.code_repair import code_repair
from videokv.kernels.subspace_iteration import operands, principal
from videokv.protocols import EncodeContext
from videokv.quantizers import subspace
from videokv.quantizers.centroid_residual import CentroidResidual, Clustering
from videokv.quantizers.float_formats import build_mxfp4
from videokv.quantizers.groupwise import Groupwise
from videokv.quantizers.kivi import build_kivi
from videokv.quantizers.query_aware import QueryAware
from videokv.quantizers.rotated import Rotated
from videokv.quantizers.subspace import Subspace, repair_of
from videokv.tensors import GroupFormat, held_bytes

INNER = {
    "rtn": Groupwise(GroupFormat(2, 16)),
    "quarot": Rotated(Groupwise(GroupFormat(2, 16))),
    "kivi": build_kivi(2)[0],
    "qvg": CentroidResidual(2, 16, clustering=Clustering(8)),
    "quantwm": QueryAware(16, clustering=Clustering(8)),
    "mxfp4": build_mxfp4()[0],
}


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moment(heads: int, size: int, *, strong: int = 4, seed: int = 1) -> torch.Tensor:
    """Mean of q q^T of queries with most of their energy in ``strong`` directions."""
    queries = tokens(1, heads, 600, size, seed=seed)
    queries = queries + 3 * tokens(1, heads, 600, strong, seed=seed + 1) @ tokens(
        1, heads, strong, size, seed=seed + 2
    ) / math.sqrt(strong)
    return queries.mT @ queries / 600


def context(query_moment=None, *, role="key", previous=None) -> EncodeContext:
    return EncodeContext(0, role, 0, query_moment, 600, previous)


@pytest.mark.parametrize("name", INNER)
def test_repair_matches_the_oracle_on_any_quantizer(name):
    """K^ = K^0 + s C U^T from the stored numbers, C = E U rounded to 8 bits, in float64."""
    x, m = tokens(1, 3, 63, 64), moment(3, 64)
    chunk = Subspace(INNER[name], rank=5).encode(x, context(m))
    base = chunk.inner.decode(torch.float32).double().numpy()
    repair = chunk.repair
    assert repair.complete and repair.places is None
    basis = repair.basis.double().numpy()
    exact = (x.double().numpy() - base) @ basis
    scales = np.float16(np.abs(exact).max(-1, keepdims=True) / 127).astype(np.float64)
    codes = np.rint(exact / scales).clip(-127, 127)
    np.testing.assert_allclose(repair.scales.double().numpy(), scales, rtol=2**-10)
    assert (repair.codes.numpy() != codes).mean() < 0.02  # float32 halves
    stored = repair.codes.double().numpy() * repair.scales.double().numpy()
    expected = base + stored @ basis.swapaxes(-1, -2)
    np.testing.assert_allclose(chunk.decode(torch.float64).numpy(), expected, rtol=1e-5, atol=1e-5)
    # What is left is orthogonal to the basis, but for 8-bit rounding.
    left = (expected - x.double().numpy()) @ basis
    assert np.abs(left).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("name", INNER)
def test_repair_lowers_what_queries_see(name):
    x, m = tokens(1, 2, 200, 64), moment(2, 64)
    chunk = Subspace(INNER[name], rank=8).encode(x, context(m))

    def seen(decoded: torch.Tensor) -> float:
        return float((((decoded - x) @ m) * (decoded - x)).sum())

    assert seen(chunk.decode(torch.float32)) < 0.45 * seen(chunk.inner.decode(torch.float32))


def principal_directions(m: torch.Tensor, *, rank: int) -> torch.Tensor:
    return principal(m, rank=rank).basis


def fit_repair(keys, decoded, basis, m):
    return repair_of(code_repair(keys, decoded, operands(basis, m)), basis)


def test_directions_are_the_eigenvectors_of_well_separated_values():
    generator = torch.Generator().manual_seed(0)
    turned = torch.linalg.qr(torch.randn(1, 2, 80, 80, generator=generator)).Q
    m = turned * (0.7 ** torch.arange(80.0)) @ turned.mT
    found = principal_directions(m, rank=3).double()
    assert found.shape == (1, 2, 80, 3)
    overlap = (found * turned[..., :3].double()).sum(-2).abs() / found.norm(dim=-2)
    np.testing.assert_allclose(overlap.numpy(), 1, atol=1e-4)
    assert bool((found.gather(-2, found.abs().argmax(-2, keepdim=True)) > 0).all())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_directions_hold_as_much_as_eigenvectors_do(scale):
    m = moment(2, 80) * scale
    best = np.linalg.eigvalsh(m.double().numpy())[..., -8:].sum(-1)
    found = principal_directions(m, rank=8).double()
    held = (found.mT @ m.double() @ found).diagonal(dim1=-2, dim2=-1).sum(-1)
    assert bool((held.numpy() > 0.995 * best).all())
    same = found.mT @ found - torch.eye(8, dtype=torch.float64)
    assert float(same.abs().max()) < 5e-3  # rounded to BF16


@pytest.mark.parametrize("m", [torch.zeros(1, 1, 64, 64), torch.ones(1, 1, 64, 64)])
def test_directions_of_degenerate_moments_are_orthonormal(m):
    found = principal_directions(m, rank=8).double()
    assert float((found.mT @ found - torch.eye(8, dtype=torch.float64)).abs().max()) < 5e-3


def test_cold_start_repairs_nothing():
    x = tokens(1, 2, 40, 64)
    chunk = Subspace(INNER["rtn"]).encode(x, context())
    plain = INNER["rtn"].encode(x, context())
    assert chunk.repair is None and held_bytes(chunk) == held_bytes(plain)
    assert torch.equal(chunk.decode(torch.float32), plain.decode(torch.float32))
    (term,) = chunk.noise()
    assert term.query_map.basis is None


def test_dense_bytes():
    x, m = tokens(1, 3, 1000, 128), moment(3, 128)
    chunk = Subspace(INNER["rtn"], rank=8).encode(x, context(m))
    assert held_bytes(chunk) - held_bytes(chunk.inner) == 3 * (1000 * (8 + 2) + 128 * 8 * 2)


def sparse_case(keep: int, *, tokens_count: int = 300):
    """Errors that are zero but for ``keep`` tokens of head 0 and half as many of head 1."""
    error = torch.zeros(1, 2, tokens_count, 64)
    error[0, 0, 7 : 7 + keep] = tokens(keep, 64)
    error[0, 1, -(keep // 2) :] = tokens(keep // 2, 64, seed=1)
    m = moment(2, 64)
    return error, fit_repair(error, torch.zeros_like(error), principal_directions(m, rank=8), m)


@pytest.mark.parametrize("keep", [2, 100, 249, 250, 251, 290])
def test_the_smaller_layout_is_stored(keep):
    """Dense 300 * 10 bytes a head, sparse keep * (10 + 2): sparse below 250 rows."""
    error, repair = sparse_case(keep)
    assert (repair.places is not None) == (keep < 250) and not repair.complete
    rows = keep * 12 if keep < 250 else 300 * 10
    assert held_bytes(repair) == 2 * rows + repair.basis.nbytes
    decoded = repair.added_to(torch.zeros_like(error))
    left = (error - decoded) @ repair.basis.float()
    assert left.abs().max() < 0.2 and repair.kept(300).sum() == keep + keep // 2
    assert not decoded[error.abs().sum(-1) == 0].any()


def test_many_tokens_keep_their_places():
    """16-bit indices beyond 32767, and 32-bit ones beyond 65535."""
    for count, dtype in ((65536, torch.int16), (65537, torch.int32)):
        error, repair = sparse_case(4, tokens_count=count)
        assert repair.places.dtype == dtype
        assert repair.kept(count)[0, 1, -2:].all() and repair.kept(count)[0, 1, :-2].sum() == 0
        assert repair.coefficients(count)[0, 0, 7:11].any()


def test_nothing_to_repair():
    x = torch.full((1, 2, 30, 64), 9.0)
    chunk = Subspace(INNER["rtn"]).encode(x, context(moment(2, 64)))
    assert chunk.repair is None and torch.equal(chunk.decode(torch.float32), x)


def test_rows_that_get_worse_are_dropped():
    """A basis of no meaning: every kept row lowers e^T M e, dropped ones would not."""
    m = moment(1, 64, strong=3)
    basis = torch.linalg.qr(tokens(1, 1, 64, 4, seed=5)).Q.to(torch.bfloat16)
    error = tokens(1, 1, 500, 64) / 10
    repair = fit_repair(error, torch.zeros_like(error), basis, m)
    kept = repair.kept(500)[0, 0, :, 0].bool()
    assert 50 < int(kept.sum()) < 450 and not repair.complete

    def seen(e: torch.Tensor) -> torch.Tensor:
        return ((e.double() @ m.double()) * e.double()).sum(-1)[0, 0]

    added = repair.added_to(torch.zeros_like(error))
    assert bool((seen(error - added)[kept] < seen(error)[kept]).all())
    full = ((error @ basis.float()) @ basis.float().mT)[..., ~kept, :]
    worse = seen(error[..., ~kept, :] - full) > 0.98 * seen(error[..., ~kept, :])
    assert worse.float().mean() > 0.99


def queries_like_the_paper(count: int, generator: torch.Generator, turn: torch.Tensor):
    """Eight directions hold 65 % of the energy and 120 the rest (d = 128)."""
    energy = torch.cat([torch.full((8,), 0.65 / 8), torch.full((120,), 0.35 / 120)]) * 128
    return (torch.randn(1, 1, count, 128, generator=generator) * energy.sqrt()) @ turn.T


@pytest.mark.parametrize("name", ["rtn", "quarot", "quantwm"])
def test_only_the_projected_correction_removes_the_bias(name):
    """log E e^(delta - b) with 70 % of the rows kept: projected b below a tenth of no b, and of the
    b of plain queries, which is as bad with the opposite sign."""
    inner = {
        "rtn": Groupwise(GroupFormat(2, 64)),
        "quarot": Rotated(Groupwise(GroupFormat(2, 64))),
        "quantwm": QueryAware(),
    }[name]
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(128, 128, generator=generator)).Q
    history = queries_like_the_paper(20_000, generator, turn)
    keys = torch.randn(1, 1, 2000, 128, generator=generator)
    m = history.mT @ history / history.shape[2]
    chunk = Subspace(inner, rank=8).encode(keys, context(m))
    keep = torch.rand(1, 1, 2000, 1, generator=generator) < 0.7
    repair = replace(chunk.repair, scales=chunk.repair.scales * keep, complete=False)
    chunk = replace(chunk, repair=repair)

    query, scale = queries_like_the_paper(400, generator, turn), 128**-0.5
    delta = (query @ (chunk.decode(torch.float32) - keys).mT).double() * scale

    def bias(noise) -> float:
        terms = [t.query_map.features(query, scale=scale) @ t.weights.mT for t in noise]
        return abs(float((delta - sum(terms)).exp().mean().log()))

    found = [bias(noise) for noise in ((), chunk.inner.noise(), chunk.noise())]
    uncorrected, unprojected, projected = found
    assert uncorrected > 0.04 and unprojected > 0.03
    assert projected < uncorrected / 10 and projected < unprojected / 10


def test_noise_of_complete_and_partial_repairs():
    x, m = tokens(1, 2, 40, 64), moment(2, 64)
    chunk = Subspace(INNER["quarot"], rank=4).encode(x, context(m))
    (plain,) = chunk.inner.noise()
    (term,) = chunk.noise()
    assert term.query_map.basis is chunk.repair.basis
    assert term.query_map.transform == plain.query_map.transform is not None
    assert term.query_map.same_as(chunk.noise()[0].query_map)
    dropped = torch.arange(40)[:, None] % 4 > 0
    repair = replace(chunk.repair, scales=chunk.repair.scales * dropped, complete=False)
    projected, rest = replace(chunk, repair=repair).noise()
    assert rest.query_map.basis is None
    assert torch.equal(projected.weights + rest.weights, plain.weights)
    assert torch.equal(rest.weights != 0, (~dropped).expand_as(plain.weights))


def test_projection_then_rotation():
    """q . (k^ - k) of the chunk is H (I - U U^T) q . e, with e the error in rotated coordinates."""
    x, m = tokens(1, 2, 40, 64), moment(2, 64)
    chunk = Subspace(INNER["quarot"], rank=4).encode(x, context(m))
    rotation = chunk.inner.rotation
    error = rotation.apply(chunk.inner.decode(torch.float32) - x)
    query = tokens(1, 2, 9, 64, seed=3)
    mapped = chunk.noise()[0].query_map.mapped(query)
    found = query @ (chunk.decode(torch.float32) - x).mT
    # Up to the 8-bit rounding of C.
    assert (found - mapped @ error.mT).abs().max() < 0.02 * found.abs().max()


def test_the_inner_quantizer_sees_its_own_previous_chunk():
    x, m = tokens(1, 2, 100, 64), moment(2, 64)
    for name in ("qvg", "quarot"):
        quantizer = Subspace(INNER[name], rank=4)
        first = quantizer.encode(x, context(m))
        second = quantizer.encode(x, context(m, previous=first))
        alone = INNER[name].encode(x, context(m, previous=first.inner))
        assert torch.equal(second.inner.decode(torch.float32), alone.decode(torch.float32))


@pytest.mark.filterwarnings("ignore:steps beyond")
def test_huge_errors_stay_finite():
    x, m = tokens(1, 1, 20, 64) * 3e5, moment(1, 64)
    chunk = Subspace(INNER["kivi"]).encode(x, context(m))
    assert bool(chunk.decode(torch.float32).isfinite().all())
    half = (tokens(1, 1, 20, 64) * 3e4).clamp(-65504, 65504).half()
    half = Subspace(INNER["rtn"]).encode(half, context(m))
    assert bool(half.decode(torch.float16).isfinite().all())


def test_refusals():
    with pytest.raises(ValueError, match="rank"):
        Subspace(INNER["rtn"], rank=0)
    with pytest.raises(ValueError, match="another"):
        Subspace(Subspace(INNER["rtn"]))
    with pytest.raises(ValueError, match="rank 8 is larger than head_dim 4"):
        Subspace(INNER["rtn"]).check(4)
    with pytest.raises(ValueError, match="head_dim 72"):
        Subspace(INNER["rtn"]).check(72)
    with pytest.raises(ValueError, match="keys"):
        Subspace(INNER["rtn"]).encode(tokens(1, 1, 3, 64), context(role="value"))
    with pytest.raises(ValueError, match="query_moment"):
        Subspace(INNER["rtn"]).encode(tokens(1, 1, 3, 64), context(moment(2, 64)))
    assert subspace.PLACE_LIMIT == 65536
