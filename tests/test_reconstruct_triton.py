"""The reconstruction kernel against the chunks' own PyTorch decode, format by format."""

import dataclasses
import warnings

import pytest
import torch

from videokv.kernels import gpu
from videokv.kernels.reconstruct import _self_check, reconstruct, reference
from videokv.protocols import EncodeContext
from videokv.quantizers.centroid_residual import CentroidResidual, Clustering
from videokv.quantizers.groupwise import Groupwise
from videokv.quantizers.query_aware import QueryAware
from videokv.quantizers.rotated import Rotated
from videokv.quantizers.subspace import Subspace
from videokv.tensors import E4M3, GroupFormat

pytest.importorskip("triton")
from videokv.kernels.reconstruct import triton as kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3, E4M3: 4e-2}
CLUSTERING = Clustering(centroids=8)
# The interpreter truncates to BF16 where a GPU rounds.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
F16 = torch.float16

FORMATS = {
    "rtn2": (Groupwise(GroupFormat(2, 32)), 128),
    "rtn2-odd": (Groupwise(GroupFormat(2, 40)), 80),
    "rtn3": (Groupwise(GroupFormat(3, 16)), 80),
    "rtn4-integer": (Groupwise(GroupFormat(4, 64, zero_point="integer")), 64),
    "rtn8-bf16": (Groupwise(GroupFormat(8, 24)), 72),
    "ternary": (Groupwise(GroupFormat(2, 64, symmetric=True)), 64),
    "kivi-keys": (Groupwise(GroupFormat(2, 32, axis="channel")), 96),
    "kivi-fp16": (
        Groupwise(GroupFormat(4, 32, axis="channel", scale_dtype=F16, zero_dtype=F16)),
        64,
    ),
    "rotated": (Rotated(Groupwise(GroupFormat(2, 32))), 64),
    "rotated3": (Rotated(Groupwise(GroupFormat(3, 32))), 64),
    "rotated4": (Rotated(Groupwise(GroupFormat(4, 32))), 64),
    "rotated-ternary": (Rotated(Groupwise(GroupFormat(2, 64, symmetric=True))), 128),
    "rotated-odd": (Rotated(Groupwise(GroupFormat(2, 16))), 80),
    "centroids": (CentroidResidual(clustering=CLUSTERING), 64),
    "centroids4": (CentroidResidual(group_size=16, stages=4, clustering=CLUSTERING), 80),
    "two-level": (QueryAware(clustering=CLUSTERING), 128),
    "quantwm": (Subspace(QueryAware(group_size=32, clustering=CLUSTERING), 8), 64),
    "psac-rotated": (Subspace(Rotated(Groupwise(GroupFormat(2, 32))), 5), 64),
}


def draw(*shape, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values + 3 * (torch.arange(shape[-1]) % 7 == 0)


def encoded(name, *, batch=1, heads=2, tokens=63):
    quantizer, size = FORMATS[name]
    query = draw(batch, heads, 200, size, seed=9) * torch.linspace(4, 0.1, size)
    context = EncodeContext(
        layer=0, role="key", query_moment=query.mT @ query / 200, query_count=200
    )
    chunk = quantizer.encode(draw(batch, heads, tokens, size), context)
    return moved(chunk)


def moved(chunk):
    from videokv.tensors import map_tensors

    return map_tensors(chunk, lambda tensor: tensor.to(DEVICE))


def body(chunk, dtype):
    """The chunk's PyTorch decode, whatever the device."""
    from videokv.tensors import map_tensors

    return map_tensors(chunk, lambda tensor: tensor.cpu()).decode(dtype)


def off(got, want):
    want = want.double()
    return float((got.cpu().double() - want).norm() / want.norm())


def run_kernel(chunk, dtype, *, factor=None):
    out = torch.full(chunk.shape, torch.nan, device=DEVICE).to(dtype)
    kernel.reconstruct(chunk.parts(), out, factor=factor)
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_kernel_equals_the_chunks_own_decode(name):
    chunk = encoded(name)
    want = body(chunk, torch.float32)
    assert off(run_kernel(chunk, torch.float32), want) < TOLERANCE[torch.float32]
    assert off(run_kernel(chunk, torch.float16), want) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("name", ["rotated", "rotated-ternary", "quantwm", "psac-rotated"])
def test_programs_of_several_blocks(name, monkeypatch):
    monkeypatch.setattr(kernel, "PROGRAMS", 1)
    monkeypatch.setattr(kernel, "ELEMENTS", dict.fromkeys(kernel.ELEMENTS, 1024))
    chunk = encoded(name, tokens=150)
    assert off(run_kernel(chunk, F16), body(chunk, torch.float32)) < TOLERANCE[F16]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("power", [-60, 20])
def test_rotated_offsets_of_any_size(split, power, monkeypatch):
    """Beyond FP16, in which the operands are: offsets have a product of their own."""
    monkeypatch.setattr(kernel, "SPLIT", split)
    chunk = encoded("rotated")
    inner = dataclasses.replace(chunk.inner, zeros=chunk.inner.zeros * 2.0**power)
    if power < 0:
        inner = dataclasses.replace(inner, steps=torch.zeros_like(inner.steps))
    chunk = dataclasses.replace(chunk, inner=inner)
    got = run_kernel(chunk, torch.bfloat16)
    assert off(got.float(), body(chunk, torch.float32)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", ["rtn2", "rtn4-integer", "kivi-keys", "centroids4", "two-level"])
def test_without_products_it_is_bit_for_bit(name):
    chunk = encoded(name)
    for dtype in (torch.float32, HALF):
        assert torch.equal(run_kernel(chunk, dtype).cpu(), body(chunk, dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_reference_equals_the_chunks_own_decode(name):
    chunk = encoded(name, tokens=17)
    got = torch.empty(chunk.shape, device=DEVICE)
    reference.reconstruct(chunk.parts(), got, factor=None)
    assert off(got, body(chunk, torch.float32)) < 1e-6


@pytest.mark.parametrize("tokens", [1, 127, 129])
def test_token_counts(tokens):
    chunk = encoded("rtn2", tokens=tokens)
    assert torch.equal(run_kernel(chunk, F16).cpu(), body(chunk, F16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_narrow_outputs(dtype):
    chunk = encoded("rotated")
    assert off(run_kernel(chunk, dtype).float(), body(chunk, torch.float32)) < TOLERANCE[dtype]


def test_e4m3_output_has_the_bits_of_a_saturating_cast():
    chunk = encoded("rtn2", heads=3)
    factor = torch.tensor([0.01, 1.0, 300.0], device=DEVICE).reshape(1, 3, 1, 1)
    got = run_kernel(chunk, E4M3, factor=factor)
    want = (body(chunk, torch.float32) * factor.cpu()).clamp(-448, 448).to(E4M3)
    assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


def test_rows_of_a_strided_buffer():
    chunk = encoded("rtn2", batch=2, tokens=33)
    batch, heads, tokens, size = chunk.shape
    buffer = torch.full((batch, 100, heads, size + 16), torch.nan, device=DEVICE, dtype=F16)
    view = buffer[..., :size].transpose(1, 2)  # [B, H, rows, D], a [B, rows, H, D + 16] in memory
    kernel.reconstruct(chunk.parts(), view[:, :, 20 : 20 + tokens], factor=None)
    assert torch.equal(view[:, :, 20 : 20 + tokens].cpu(), body(chunk, F16))
    view[:, :, 20 : 20 + tokens] = torch.nan
    assert buffer.isnan().all()


def test_transposed_output():
    chunk = encoded("rtn2")
    buffer = torch.empty(1, 2, 128, 63, device=DEVICE, dtype=F16)
    kernel.reconstruct(chunk.parts(), buffer.mT, factor=None)
    assert torch.equal(buffer.mT.cpu(), body(chunk, F16))


def test_a_normaliser_is_honoured():
    quantizer = Groupwise(GroupFormat(2, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chunk = moved(quantizer.encode(draw(1, 2, 9, 64) * 5000, EncodeContext(0, "key")))
    assert chunk.normaliser is not None
    assert off(run_kernel(chunk, torch.float32), body(chunk, torch.float32)) < 1e-6


def test_groups_without_a_range_give_their_value_back():
    for zero_point in ("offset", "integer"):
        quantizer = Groupwise(GroupFormat(2, 32, zero_point=zero_point))
        x = torch.full((1, 1, 5, 64), 5.0)
        chunk = moved(quantizer.encode(x, EncodeContext(0, "key")))
        assert torch.equal(run_kernel(chunk, torch.float32).cpu(), x)


def test_sparse_repairs():
    chunk = encoded("quantwm")
    repair = chunk.repair
    places = torch.arange(0, 62, 3, dtype=torch.int16, device=DEVICE)
    rows = places.long()
    sparse = dataclasses.replace(
        repair,
        codes=repair.codes[:, :, rows].contiguous(),
        scales=repair.scales[:, :, rows].contiguous(),
        places=places.expand(1, 2, -1).contiguous(),
        complete=False,
    )
    chunk = dataclasses.replace(chunk, repair=sparse)
    assert off(run_kernel(chunk, torch.float32), body(chunk, torch.float32)) < 1e-6


def test_the_call_writes_rows_and_refuses_what_does_not_fit():
    chunk = encoded("rtn2", tokens=5)
    parts = chunk.parts()
    out = torch.full((1, 2, 12, 128), torch.nan, device=DEVICE)
    view = reconstruct(parts, out=out, row=4)
    assert torch.equal(view.cpu(), body(chunk, torch.float32))
    assert out[:, :, :4].isnan().all() and out[:, :, 9:].isnan().all()
    with pytest.raises(ValueError, match="at row 8 needs"):
        reconstruct(parts, out=out, row=8)
    with pytest.raises(ValueError, match="either dtype or out"):
        reconstruct(parts)


def test_a_kernel_that_disagrees_is_not_used(monkeypatch):
    chunk = encoded("rtn2", tokens=5)
    calls = []

    def wrong(parts, out, *, factor, rope=None, programs=None):
        calls.append(1)
        out.fill_(1.0)

    monkeypatch.setattr(gpu, "_verdicts", {})
    monkeypatch.setattr("videokv.kernels.reconstruct.machine_refusal", lambda device: None)
    monkeypatch.setattr(kernel, "reconstruct", wrong)
    for _ in range(3):
        got = reconstruct(chunk.parts(), dtype=F16)
    assert torch.equal(got.cpu(), body(chunk, F16)) and len(calls) == 1


def test_a_kernel_that_agrees_is_used(monkeypatch):
    chunk = encoded("rotated", tokens=5)
    monkeypatch.setattr(gpu, "_verdicts", {})
    monkeypatch.setattr("videokv.kernels.reconstruct.machine_refusal", lambda device: None)
    monkeypatch.setattr(reference, "reconstruct", _once(reference.reconstruct))
    for _ in range(3):
        got = reconstruct(chunk.parts(), dtype=torch.bfloat16)
    assert off(got.float(), body(chunk, torch.float32)) < TOLERANCE[torch.bfloat16]


def _once(function):
    calls = []

    def call(*args, **kwargs):
        assert not calls, "the reference was used after the self-check"
        calls.append(1)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("dtype", [torch.float32, F16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_self_check_passes_on_a_corner_of_many_rows_and_heads(name, dtype):
    """Its corner of three batch rows and five heads is a view whose rows lie apart."""
    parts = encoded(name, batch=3, heads=5, tokens=33).parts()
    assert not parts.corner(2).steps.is_contiguous()
    assert _self_check(parts, dtype, None) is None
