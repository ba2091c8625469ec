"""What every registered quantizer has to keep. New families are picked up by themselves.

A family of one width (``bits == ()``) is built without arguments.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from videokv.protocols import EncodeContext, Packed, Quantizer
from videokv.quantizers import families
from videokv.tensors import held_bytes, map_tensors, walk_tensors

CASES = [
    pytest.param(name, bits, role, id=f"{name}-{bits}bit-{role}" if bits else f"{name}-{role}")
    for name, family in families().items()
    for bits in (family.bits or (None,))
    for role in ("key", "value")
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1, 64), (2, 3, 63, 128), (1, 2, 100, 256), (1, 1, 37, 80), (1, 2, 33, 72)]

# Signal to error in dB by width: ternary codes of Laplace data set the 2-bit floors.
FLOORS_DB = {2: (3.0, 1.5), 3: (11.0, 8.0), 4: (15.0, 12.0), 8: (28.0, 28.0)}

each_case = pytest.mark.parametrize(("name", "bits", "role"), CASES)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Warnings about extreme steps belong to the tests of single methods."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def build(name: str, bits: int | None, role: str) -> Quantizer:
    family = families()[name]
    keys, values = family.build() if bits is None else family.build(bits)
    return keys if role == "key" else values


def width(name: str, bits: int | None) -> int:
    """Bits of a code; a format of one width says them in its name, or has 4."""
    said = re.search(r"-(\d+)bit", name)
    return bits or (int(said[1]) if said else 4)


def context(role: str, **more) -> EncodeContext:
    return EncodeContext(layer=7, role=role, seed=3, **more)  # type: ignore[arg-type]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def laplace(*shape: int) -> Tensor:
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(1)) - 0.5
    return -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.4999999))


def same(a: Packed, b: Packed) -> bool:
    pairs = zip(walk_tensors(a), walk_tensors(b), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x.float(), y.float()) for x, y in pairs)


def snr_db(x: Tensor, back: Tensor) -> float:
    x, back = x.double(), back.double()
    return 10 * torch.log10(x.square().sum() / (back - x).square().sum()).item()


@each_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_shapes_and_refusals(name, bits, role, shape, dtype):
    quantizer, x = build(name, bits, role), randn(*shape, dtype=dtype)
    before = x.clone()
    try:
        quantizer.check(shape[-1])
    except ValueError as refusal:
        assert str(shape[-1]) in str(refusal)
        with pytest.raises(ValueError, match=str(shape[-1])):
            quantizer.encode(x, context(role))
        return
    chunk = quantizer.encode(x, context(role))
    assert isinstance(chunk, Packed) and chunk.shape == shape
    assert dataclasses.is_dataclass(chunk) and chunk.__dataclass_params__.frozen
    for target in DTYPES:
        back = chunk.decode(target)
        assert back.shape == x.shape and back.dtype == target
        assert torch.isfinite(back).all()
    assert snr_db(x, chunk.decode(torch.float32)) > 1
    assert torch.equal(x, before)


@each_case
def test_same_codes_every_time(name, bits, role):
    quantizer, x = build(name, bits, role), randn(2, 2, 150, 128)
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    first = quantizer.encode(x, context(role))
    try:
        torch.set_num_threads(1)
        one = quantizer.encode(x, context(role))
        torch.set_num_threads(2)
        two = build(name, bits, role).encode(x, context(role))
    finally:
        torch.set_num_threads(threads)
    assert same(first, one) and same(one, two)
    assert torch.equal(first.decode(torch.float32), first.decode(torch.float32))
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"


@each_case
def test_rows_do_not_depend_on_each_other(name, bits, role):
    quantizer, x = build(name, bits, role), randn(2, 2, 90, 128)
    x[1] *= 40
    together = quantizer.encode(x, context(role)).decode(torch.float32)
    for row in range(2):
        alone = quantizer.encode(x[row : row + 1], context(role)).decode(torch.float32)
        changed = ~torch.isclose(together[row], alone[0], rtol=1e-4, atol=1e-4)
        assert changed.float().mean() < 1e-3  # products may round otherwise in another batch


@each_case
def test_strided_input_equals_contiguous(name, bits, role):
    quantizer = build(name, bits, role)
    fused = randn(2, 70, 3, 2, 128)  # [B, T, qkv, H, D]
    views = [
        fused[:, :, 1].transpose(1, 2),
        randn(1, 2, 128, 70).transpose(2, 3),
        randn(1, 2, 140, 128)[:, :, ::2],
        randn(1, 1, 70, 128).expand(3, 2, -1, -1),
    ]
    for view in views:
        strided = quantizer.encode(view, context(role))
        assert same(strided, quantizer.encode(view.contiguous(), context(role)))


@each_case
def test_held_bytes(name, bits, role):
    x = randn(1, 2, 2048, 128, dtype=torch.bfloat16)
    chunk = build(name, bits, role).encode(x, context(role))
    held, dense = held_bytes(chunk), x.numel() * 2
    assert 0 < held < dense
    assert held * 8 >= width(name, bits) * x.numel(), "fewer bytes than codes"
    if bits is not None:
        assert held * 8 < (bits + 2) * x.numel()
    kept = {tensor.untyped_storage().data_ptr() for tensor in walk_tensors(chunk)}
    assert x.untyped_storage().data_ptr() not in kept


@each_case
def test_batch_rows_of_a_chunk(name, bits, role):
    x = randn(3, 2, 65, 128)
    chunk = build(name, bits, role).encode(x, context(role))
    rows = torch.tensor([2, 0, 0])
    picked = map_tensors(chunk, lambda tensor: tensor.index_select(0, rows))
    assert torch.equal(picked.decode(torch.float32), chunk.decode(torch.float32)[rows])


@each_case
def test_quality_floors(name, bits, role):
    quantizer = build(name, bits, role)
    channels = torch.ones(128)
    channels[::17] = 6.0
    gauss, heavy = FLOORS_DB[width(name, bits)]
    data = {
        "gauss": (randn(1, 2, 512, 128), gauss),
        "laplace": (laplace(1, 2, 512, 128), heavy),
        "outliers": (randn(1, 2, 512, 128) * channels, heavy),
    }
    for law, (x, floor) in data.items():
        back = quantizer.encode(x, context(role)).decode(torch.float32)
        assert snr_db(x, back) > floor, law


@pytest.mark.parametrize("name", [name for name, family in families().items() if family.bits])
@pytest.mark.parametrize("role", ["key", "value"])
def test_error_falls_with_bits(name, role):
    x = randn(1, 2, 256, 128)
    errors = [
        (build(name, bits, role).encode(x, context(role)).decode(torch.float32) - x).square().mean()
        for bits in sorted(families()[name].bits)
    ]
    assert errors == sorted(errors, reverse=True)


def degenerate() -> dict[str, Tensor]:
    constant = torch.ones(1, 2, 40, 128)
    outlier = randn(1, 2, 40, 128)
    outlier[..., 7] += 300
    mixed = randn(1, 2, 40, 128)
    mixed[:, :, ::3] = 0
    return {
        "zeros": constant * 0,
        "nine": constant * 9,
        "minus-nine": constant * -9,
        "thousandth": constant * 0.001,
        "tiny-constant": constant * 1e-30,
        "tiny": randn(1, 2, 40, 128) * 1e-30,
        "huge": randn(1, 2, 40, 128) * 3e5,
        "huge-constant": constant * 3e5,
        "outlier": outlier,
        "some-zero-tokens": mixed,
        "one-token": randn(1, 2, 1, 128),
        "two-values": constant * torch.tensor([1.0, -1.0]).repeat(64),
        "one-hot": torch.eye(128)[None, None, :40].repeat(1, 2, 1, 1),
    }


@each_case
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", degenerate())
def test_degenerate_input(name, bits, role, kind, dtype):
    x = degenerate()[kind].to(dtype)
    if not bool(torch.isfinite(x).all()):
        pytest.skip("not a number of this dtype")
    chunk = build(name, bits, role).encode(x, context(role))
    for target in (torch.float32, dtype):
        back = chunk.decode(target)
        assert torch.isfinite(back).all()
        error = (back.double() - x.double()).square().sum()
        assert error <= 1.05 * x.double().square().sum()
    for term in chunk.noise():
        assert torch.isfinite(term.weights).all() and (term.weights >= 0).all()


@each_case
@pytest.mark.parametrize("tokens", [1, 33, 64])
def test_noise_has_features_for_every_weight(name, bits, role, tokens):
    chunk = build(name, bits, role).encode(randn(2, 2, tokens, 128), context(role))
    query = randn(2, 6, 5, 128, seed=9)
    for term in chunk.noise():
        features = term.query_map.features(query, scale=128**-0.5)
        assert features.shape[:3] == (2, 6, 5) and torch.isfinite(features).all()
        columns = features.shape[-1]
        assert term.weights.dtype == torch.float32
        assert (term.weights >= 0).all() and torch.isfinite(term.weights).all()
        torch.broadcast_to(term.weights, (2, 2, tokens, columns))


@each_case
def test_noise_is_about_the_error(name, bits, role):
    """Half the variance of score errors, within a factor of four (formats differ in rho)."""
    keys, queries = randn(1, 1, 1024, 128), randn(1, 1, 8, 128, seed=2)
    chunk = build(name, bits, role).encode(keys, context(role))
    if not chunk.noise():
        pytest.skip("this method has no noise model")
    scale = 128**-0.5
    predicted = sum(
        (term.query_map.features(queries, scale=scale) @ term.weights.mT).mean()
        for term in chunk.noise()
    )
    error = chunk.decode(torch.float32) - keys
    measured = (queries @ error.mT * scale).square().mean() / 2
    assert measured / 4 < predicted < measured * 4


@each_case
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_input_names_the_layer(name, bits, role, bad):
    x = randn(1, 2, 40, 128)
    x[0, 1, 39, 5] = bad
    with pytest.raises(ValueError, match="layer 7"):
        build(name, bits, role).encode(x, context(role))


@each_case
def test_bad_shapes_and_dtypes(name, bits, role):
    quantizer = build(name, bits, role)
    for bad in (randn(2, 40, 128), randn(1, 2, 0, 128), randn(1, 2, 4, 128).double()):
        with pytest.raises(ValueError):
            quantizer.encode(bad, context(role))


@each_case
def test_a_warm_chunk(name, bits, role):
    """With queries and a chunk before it: encoding, bytes and noise keep their promises."""
    quantizer = build(name, bits, role)
    queries = randn(1, 2, 300, 128, seed=5) * torch.linspace(0.1, 3, 128)
    first = quantizer.encode(randn(1, 2, 96, 128), context(role))
    warm = context(role, query_moment=queries.mT @ queries / 300, query_count=300, previous=first)
    x = randn(1, 2, 80, 128, seed=6)
    second = quantizer.encode(x, warm)
    assert same(second, quantizer.encode(x, warm))
    back = second.decode(torch.float32)
    assert back.shape == x.shape and snr_db(x, back) > 1
    for term in second.noise():
        assert torch.isfinite(term.weights).all() and (term.weights >= 0).all()


@each_case
def test_chunks_carry_no_gradient(name, bits, role):
    x = randn(1, 2, 40, 128).requires_grad_()
    chunk = build(name, bits, role).encode(x, context(role))
    assert not any(tensor.requires_grad for tensor in walk_tensors(chunk))
