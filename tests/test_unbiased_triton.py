"""Kernels of videokv's own format: reconstruct, encode, k-means beside zero, few queries."""

import dataclasses

import pytest
import torch

from videokv.kernels import gpu
from videokv.kernels import quantize_unbiased as quantize
from videokv.kernels.assign_centroids import few, spread_tokens
from videokv.kernels.attend_packed import PackedCall
from videokv.kernels.attend_packed import reference as attend_reference
from videokv.kernels.pack_codes import unpack
from videokv.kernels.reconstruct import Parts, decode_into, reconstruct
from videokv.kernels.reconstruct import reference as reconstruct_reference
from videokv.protocols import EncodeContext
from videokv.quantizers.subspace import Subspace
from videokv.quantizers.unbiased import Unbiased, fit_centres
from videokv.rotation import Rotation
from videokv.tensors import E4M3, map_tensors

pytest.importorskip("triton")
from videokv.kernels.assign_centroids import triton_few as few_kernel  # noqa: E402
from videokv.kernels.attend_packed import triton as attend_kernel  # noqa: E402
from videokv.kernels.quantize_unbiased import triton as quantize_kernel  # noqa: E402
from videokv.kernels.reconstruct import triton as reconstruct_kernel  # noqa: E402
from videokv.kernels.reconstruct import triton_unbiased  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, F32 = torch.float16, torch.float32
# The interpreter truncates to BF16 where a GPU rounds, and multiplies BF16 blocks wrongly.
BF16_TOLERANCE = 4e-3 if DEVICE == "cuda" else 8e-3
TOLERANCE = {F32: 1e-6, F16: 1e-3, torch.bfloat16: BF16_TOLERANCE, E4M3: 4e-2}
KEYS = EncodeContext(0, "key", seed=2)


def draw(*shape, seed=0):
    """Gaussian tokens around a common mean, the first near zero, a channel far out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) + 2 * torch.randn(shape[-1], generator=generator)
    x[..., 3] += 20
    x[:, :, 0] *= 0.01
    return x


def moved(holder):
    return map_tensors(holder, lambda tensor: tensor.to(DEVICE))


def encoded(bits=3, size=128, tokens=63, *, batch=1, heads=2, **options):
    return moved(Unbiased(bits, **options).encode(draw(batch, heads, tokens, size), KEYS))


def exact(chunk):
    """The chunk in float64: what every body rounds."""
    chunk = map_tensors(chunk, lambda tensor: tensor.cpu())
    codes = unpack(chunk.packed, bits=chunk.bits, count=chunk.rotation.head_dim).double()
    groups = (codes - ((1 << chunk.bits) - 1) / 2).unflatten(-1, (chunk.steps.shape[3], -1))
    steps = chunk.scale.double() * 2.0 ** (chunk.steps.double() / -20)
    steps[chunk.steps == 255] = 0
    centres = chunk.centres
    table = torch.nn.functional.pad(centres.table.float().double(), (0, 0, 1, 0))
    labels = unpack(centres.ids, bits=centres.label_bits, count=centres.tokens).long()
    rows = labels.unsqueeze(-1).expand(*labels.shape, table.shape[3])
    mean = table.gather(2, rows) * centres.scale.double()
    return chunk.rotation.invert((groups * steps.unsqueeze(-1)).flatten(-2)) + mean


def off(got, want):
    want = want.double().cpu()
    return float((got.cpu().double() - want).norm() / want.norm())


def run(chunk, dtype, *, factor=None):
    out = torch.full(chunk.shape, torch.nan, device=DEVICE).to(dtype)
    reconstruct_kernel.reconstruct(chunk.parts(), out, factor=factor)
    return out


@pytest.mark.parametrize(
    ("bits", "size", "label_bits"),
    [(2, 128, 2), (3, 128, 3), (4, 128, 4), (2, 64, 3), (3, 80, 2), (3, 72, 4), (2, 63, 2)],
)
@pytest.mark.parametrize("tokens", [1, 127, 129])
def test_reconstruct(bits, size, label_bits, tokens):
    chunk = encoded(bits, size, tokens, label_bits=label_bits)
    want = exact(chunk)
    for dtype in (F32, F16):
        assert off(run(chunk, dtype), want) < TOLERANCE[dtype]


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("split", [(), (2, 3, 4)])
def test_reconstruct_with_and_without_rows_of_codes(bits, split, monkeypatch):
    monkeypatch.setattr(triton_unbiased, "SPLIT_BITS", split)
    monkeypatch.setattr(triton_unbiased, "PROGRAMS", 1)
    chunk = encoded(bits, 128, 150)
    for dtype in (F32, F16):
        assert off(run(chunk, dtype), exact(chunk)) < TOLERANCE[dtype]


def test_reconstruct_centroids_that_are_all_zero():
    chunk = encoded(2, 64, 20)
    table = torch.zeros_like(chunk.centres.table)
    centres = dataclasses.replace(
        chunk.centres, table=table, scale=torch.zeros_like(chunk.centres.scale)
    )
    chunk = dataclasses.replace(chunk, centres=centres)
    assert off(run(chunk, F16), exact(chunk)) < TOLERANCE[F16]


def test_reconstruct_a_long_chunk():
    chunk = encoded(3, 128, 1025, heads=1)
    assert chunk.centres.label_bits == 4
    assert off(run(chunk, F16), exact(chunk)) < TOLERANCE[F16]


@pytest.mark.parametrize("dtype", [F32, F16, torch.bfloat16, E4M3])
def test_reconstruct_in_every_dtype(dtype):
    chunk = encoded()
    factor = torch.tensor([0.5, 2.0], device=DEVICE).reshape(1, 2, 1, 1)
    want = exact(chunk) * factor.cpu()
    assert off(run(chunk, dtype, factor=factor).float(), want) < TOLERANCE[dtype]


@pytest.mark.parametrize(("size", "group"), [(128, 64), (80, 40), (256, None), (64, 8)])
def test_several_steps_a_token(size, group):
    chunk = encoded(2, size, 33, group_size=group)
    assert off(run(chunk, F16), exact(chunk)) < TOLERANCE[F16]
    # A rotation of 256 x 256 in float32 fits no multiprocessor: the reference serves it on a GPU.
    wide = (
        run(chunk, F32) if size < 256 or DEVICE == "cpu" else reconstruct(chunk.parts(), dtype=F32)
    )
    assert off(wide, exact(chunk)) < TOLERANCE[F32]


def test_the_reference_gives_the_bits_of_the_chunks_own_decode():
    """On one device; another may add up the rotation's sums in another order."""
    for bits, size, group in ((2, 64, None), (3, 80, None), (4, 256, 32)):
        chunk = encoded(bits, size, 40, group_size=group)
        got = torch.empty(chunk.shape, device=DEVICE)
        reconstruct_reference.reconstruct(chunk.parts(), got, factor=None)
        want = map_tensors(chunk, lambda tensor: tensor.cpu()).decode(F32)
        if DEVICE == "cpu":
            assert torch.equal(got, want)
        assert off(got, want) < 2.0**-24 * size**0.5  # float32 sums of ``size`` terms


def test_rows_of_a_strided_buffer_and_a_stretch_of_blocks(monkeypatch):
    monkeypatch.setattr(triton_unbiased, "PROGRAMS", 3)
    chunk = encoded(3, 64, 400, batch=2)
    batch, heads, tokens, size = chunk.shape
    buffer = torch.full((batch, 500, heads, size + 16), torch.nan, device=DEVICE, dtype=F16)
    view = buffer[..., :size].transpose(1, 2)
    reconstruct_kernel.reconstruct(chunk.parts(), view[:, :, 20 : 20 + tokens], factor=None)
    assert off(view[:, :, 20 : 20 + tokens], exact(chunk)) < TOLERANCE[F16]
    view[:, :, 20 : 20 + tokens] = torch.nan
    assert buffer.isnan().all()
    mirrored = torch.empty(batch, heads, size, tokens, device=DEVICE)
    reconstruct_kernel.reconstruct(chunk.parts(), mirrored.mT, factor=None)
    assert off(mirrored.mT, exact(chunk)) < TOLERANCE[F32]


def test_codes_that_do_not_begin_at_a_word():
    chunk = encoded(3, 64, 5)
    shifted = torch.zeros(chunk.packed.numel() + 1, dtype=torch.uint8, device=DEVICE)
    shifted[1:] = chunk.packed.flatten()
    view = shifted[1:].view(chunk.packed.shape)
    assert off(run(dataclasses.replace(chunk, packed=view), F32), exact(chunk)) < 1e-6


def test_a_repair_is_added():
    x = draw(1, 2, 40, 64)
    query = draw(1, 2, 200, 64, seed=9)
    context = EncodeContext(0, "key", query_moment=query.mT @ query / 200, query_count=200)
    chunk = moved(Subspace(Unbiased(2), 5).encode(x, context))
    want = map_tensors(chunk, lambda tensor: tensor.cpu()).decode(F32)
    assert chunk.parts() is not None
    assert off(run(chunk, F32), want) < 1e-6 and off(run(chunk, F16), want) < 1e-3


def test_degenerate_chunks():
    x = torch.zeros(1, 2, 9, 64)
    x[0, 1, 3] = 5.0
    x[0, 0, 4, 7] = 1e-30
    chunk = moved(Unbiased(2).encode(x, KEYS))
    for dtype in (F32, F16):
        assert torch.equal(run(chunk, dtype).isfinite().cpu(), torch.ones(1, 2, 9, 64).bool())
    assert torch.allclose(run(chunk, F32).cpu().double(), exact(chunk), atol=1e-6)
    huge = moved(Unbiased(2).encode(draw(1, 1, 9, 64) * 1e10, KEYS))
    assert off(run(huge, F32), exact(huge)) < 1e-6
    assert run(huge, F16).isfinite().all()


def test_parts_that_do_not_belong_together_are_refused():
    parts = encoded().parts()
    for change in ({"log_steps": False}, {"zero": "none"}, {"centres": None}, {"rotation": None}):
        with pytest.raises(ValueError, match="come together"):
            dataclasses.replace(parts, **change)


def sides(x, bits, size, *, group=None, label_bits=2):
    centres = moved(fit_centres(x.cpu(), bits=label_bits, iterations=2, seed=0))
    options = {"bits": bits, "group_size": group or size, "centres": centres}
    options["rotation"] = Rotation(size, 1)
    return quantize_kernel.quantize(x, **options), quantize.reference.quantize(x, **options)


@pytest.mark.parametrize("tokens", [1, 129])
@pytest.mark.parametrize(
    ("bits", "size", "group", "dtype"),
    [
        (2, 128, None, F16),
        (3, 128, None, F32),
        (4, 64, None, F16),
        (3, 80, None, F16),
        (2, 72, None, F32),
        (2, 63, None, F16),
        (3, 80, 16, F16),
        (2, 256, 128, F16),
    ],
)
def test_encode(bits, size, group, dtype, tokens):
    x = draw(1, 2, tokens, size).to(DEVICE, dtype)
    (packed, steps, largest), (want, want_steps) = sides(x, bits, size, group=group)
    unlike = (packed != want).any(-1).float().mean()
    assert unlike <= max(0.01, 1.5 / (2 * tokens) if tokens < 200 else 0)
    assert off(steps, want_steps) < 1e-3
    assert float(largest[0].amax()) == float(x.abs().amax())
    codes, scale, most = quantize_kernel.code_steps(steps, largest)
    want_codes, want_scale = quantize.coded_steps(steps)
    assert torch.equal(scale, want_scale) and torch.equal(most, x.abs().float().amax((2, 3)))
    assert (codes.int() - want_codes.int()).abs().amax() <= 1  # logarithms half-way between two
    assert float((codes != want_codes).float().mean()) < 0.02


@pytest.mark.parametrize("tokens", [127, 1025])
def test_encode_of_longer_chunks(tokens):
    x = draw(1, 1, tokens, 64).to(DEVICE, F16)
    (packed, steps, _), (want, want_steps) = sides(x, 3, 64, label_bits=4)
    assert float((packed != want).any(-1).float().mean()) <= 0.01
    assert off(steps, want_steps) < 1e-3


def test_encode_reads_any_strides():
    x = draw(1, 67, 3, 128).reshape(1, 67, 3, 2, 64)[:, :, 1].transpose(1, 2).to(DEVICE, F16)
    assert not x.is_contiguous()
    (packed, steps, _), (want, want_steps) = sides(x, 3, 64)
    assert float((packed != want).any(-1).float().mean()) < 0.02 and off(steps, want_steps) < 1e-3
    last = draw(1, 2, 64, 40).to(DEVICE).mT
    (packed, _, _), (want, _) = sides(last, 2, 64)
    assert float((packed != want).any(-1).float().mean()) < 0.05


@pytest.mark.parametrize(("size", "label_bits"), [(64, 4), (80, 3), (63, 2)])
def test_the_rotated_table(size, label_bits):
    x = draw(1, 2, 60, size)
    centres = fit_centres(x, bits=label_bits, iterations=1, seed=0)
    rotation = Rotation(size, 3)
    halves, scale = quantize_kernel.turned_table(moved(centres), rotation)
    got = halves.double() * scale.double()
    count = (1 << label_bits) - 1
    want = rotation.apply(centres.table.double() * centres.scale.double())
    assert off(got[:, :, 1 : count + 1] + got[:, :, 17 : count + 17], want) < 2e-6
    got[:, :, 1 : count + 1] = got[:, :, 17 : count + 17] = 0
    assert not got.any()


def test_encode_of_degenerate_tokens():
    x = torch.zeros(1, 2, 40, 64, device=DEVICE)
    (packed, steps, _), (want, want_steps) = sides(x, 2, 64)
    assert torch.equal(packed, want) and torch.equal(steps, want_steps) and not steps.any()
    codes, scale, _ = quantize_kernel.code_steps(steps, torch.zeros(2, 2, 1, device=DEVICE))
    assert (codes == 255).all() and not scale.any()
    x[0, 1, 7] = 1e-25
    x[0, 0, 9, 1] = 1e14
    (packed, steps, _), (want, want_steps) = sides(x, 3, 64)
    assert torch.isfinite(steps).all() and off(steps, want_steps) < 1e-3


def test_what_is_not_finite_is_told():
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = draw(1, 2, 70, 64).to(DEVICE)
        centres = moved(fit_centres(x.cpu(), bits=2, iterations=1, seed=0))
        x[0, 1, 65, 5] = bad
        _, steps, largest = quantize_kernel.quantize(
            x, bits=2, group_size=64, centres=centres, rotation=Rotation(64)
        )
        assert not float(quantize_kernel.code_steps(steps, largest)[2].amax()) < 1e15


@pytest.mark.parametrize(
    ("bits", "size", "dtype", "tokens"),
    [(2, 64, F16, 1), (3, 80, F32, 63), (4, 128, F16, 500), (4, 64, F16, 1025), (3, 63, F16, 40)],
)
def test_few_centroids_are_those_of_the_steps(bits, size, dtype, tokens):
    x = draw(1, 2, tokens, size).to(DEVICE, dtype)
    count = (1 << bits) - 1
    start = few_kernel.spread(x, count=count, seed=5)
    if DEVICE == "cpu":  # on a GPU a distance rounded otherwise may draw another token
        assert torch.equal(start, spread_tokens(x, count=count, seed=5))
    for iterations in (1, 4):
        got = few_kernel.few_centres(x, start, bits=bits, iterations=iterations)
        want = few.in_steps(x, start, bits=bits, iterations=iterations)
        assert [t.shape for t in got] == [t.shape for t in want]
        tables = [table.float() * scale for _, table, scale in (got, want)]
        labels = [unpack(ids, bits=bits, count=tokens) for ids, *_ in (got, want)]
        if DEVICE == "cpu" and (dtype == F32 or tokens <= 500):
            assert off(*tables) < 1e-6 and torch.equal(*labels)
        else:  # rows of 16 bits, and TF32, leave a token between two centroids to either
            near = [
                float(few._residual(x, table, label).norm())
                for table, label in zip(tables, labels, strict=True)
            ]
            assert abs(near[0] - near[1]) < 2e-3 * near[1]


def test_starts_draw_every_distinct_token_before_any_twice():
    x = draw(1, 2, 5, 64).repeat_interleave(40, 2).to(DEVICE, F16)
    start = few_kernel.spread(x, count=7, seed=1)
    for head in start[0].unbind(0):
        assert len({tuple(row) for row in head.tolist()}) == 5
        assert torch.equal(head[5], x[0, 0, -1].float()) or torch.equal(
            head[5], x[0, 1, -1].float()
        )
    assert torch.equal(start, spread_tokens(x, count=7, seed=1))


def test_few_centroids_are_the_same_alone_and_in_any_layout():
    x = draw(2, 3, 200, 64).to(DEVICE, F16)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    whole = assign_centroids_by_kernel(x)
    for got, want in zip(assign_centroids_by_kernel(strided), whole, strict=True):
        assert torch.equal(got.float(), want.float())
    for got, want in zip(assign_centroids_by_kernel(x[1:, 2:]), whole, strict=True):
        assert torch.equal(got.float(), want[1:, 2:].float())


def assign_centroids_by_kernel(x):
    return few.by_kernel(x, bits=3, iterations=3, seed=0)


@pytest.fixture
def kernels(monkeypatch):
    """As on a GPU: kernels are asked first."""
    monkeypatch.setattr(gpu, "_verdicts", {})
    for room in ("reconstruct", "quantize_unbiased", "assign_centroids"):
        monkeypatch.setattr(f"videokv.kernels.{room}.machine_refusal", lambda device: None)
        monkeypatch.setattr(f"videokv.kernels.{room}.wants_kernels", lambda device: True)


@pytest.mark.parametrize(
    ("bits", "size", "dtype", "tokens"), [(3, 64, F16, 9), (2, 80, F32, 63), (2, 64, F16, 1025)]
)
def test_the_quantizer_uses_the_kernels(bits, size, dtype, tokens, request):
    x = draw(1, 1, tokens, size).to(DEVICE, dtype)
    want = Unbiased(bits).encode(x.cpu(), KEYS)
    request.getfixturevalue("kernels")
    got = Unbiased(bits).encode(x, KEYS)
    assert not any(gpu._verdicts.values()) and {key[0] for key in gpu._verdicts} >= {
        "few_centres",
        "quantize_unbiased",
    }
    tables = (chunk.centres.real_table() for chunk in (got, want))
    alike = DEVICE == "cpu" and dtype == F32
    assert off(*tables) < (1e-6 if alike else 5e-2)
    error = off(got.decode(F32), x)
    assert abs(error - off(want.decode(F32), x)) < (1e-4 if alike else 2e-2) * error
    rows = torch.empty(x.shape, device=DEVICE, dtype=F16)
    decode_into(got, rows)
    assert off(rows, exact(got)) < TOLERANCE[F16]
    assert off(reconstruct(got.parts(), dtype=F32), exact(got)) < TOLERANCE[F32]


def test_the_quantizer_refuses_with_kernels_too(kernels):
    x = draw(1, 2, 20, 64).to(DEVICE)
    x[0, 0, 4, 4] = torch.nan
    with pytest.raises(ValueError, match="keys of layer 0"):
        Unbiased(2).encode(x, KEYS)


def test_a_kernel_that_disagrees_is_not_used(kernels, monkeypatch):
    calls = []

    def wrong(x, **options):
        calls.append(1)
        packed, steps = quantize.reference.quantize(x, **options)
        return packed ^ 255, steps, x.abs().amax()

    x = draw(1, 2, 100, 64).to(DEVICE)
    monkeypatch.setattr(quantize_kernel, "quantize", wrong)
    for _ in range(2):
        with pytest.warns(UserWarning, match="bytes differ") if not calls else _nothing():
            chunk = Unbiased(2).encode(x, KEYS)
    assert len(calls) == 1 and off(chunk.decode(F32), x) < 0.5


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


def make_call(
    bits=(3, 2), *, size=64, group=None, dtype=F32, heads=(4, 2), queries=3, tokens=150, columns=2
):
    parts: list[Parts] = []
    for width, seed in zip(bits, (1, 2), strict=True):
        x = draw(2, heads[1], tokens, size, seed=seed) / 4
        parts.append(moved(Unbiased(width, group, label_bits=seed + 1).encode(x, KEYS)).parts())
    extra_q = -draw(2, heads[0], queries, columns + 4, seed=4)[..., -columns:].abs()
    extra_k = draw(2, heads[1], tokens, columns + 4, seed=5)[..., -columns:].abs()
    query = draw(2, heads[0], queries, size, seed=3).to(DEVICE, dtype)
    return PackedCall(query, *parts, size**-0.5, extra_q.to(DEVICE), extra_k.to(DEVICE))


@pytest.mark.parametrize(
    ("size", "tokens"), [(64, 1), (64, 129), (80, 129), (128, 129), (64, 1025)]
)
def test_few_queries(size, tokens):
    call = make_call(size=size, tokens=tokens)
    got, lse = attend_kernel.attend_packed(call)
    want, want_lse = attend_reference.attend_packed(call)
    assert off(got, want) < 1e-5 and off(lse, want_lse) < 1e-5


@pytest.mark.parametrize("mixed", [False, True])
def test_few_queries_where_tokens_have_several_steps(mixed):
    """By the kernel of all formats, which unpacks labels and logarithmic steps too."""
    call = make_call(group=32)
    if mixed:
        call = dataclasses.replace(call, values=make_call().values)
    got, lse = attend_kernel.attend_packed(call)
    want, want_lse = attend_reference.attend_packed(call)
    assert off(got, want) < 1e-5 and off(lse, want_lse) < 1e-5


@pytest.mark.parametrize("size", [64, 80])
def test_few_queries_in_half_precision(size):
    call = make_call(dtype=F16, size=size)
    got, lse = attend_kernel.attend_packed(call)
    want, want_lse = attend_reference.attend_packed(call)
    assert off(got, want) < 3e-3 and off(lse, want_lse) < 3e-3


@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [(F32, 64), (F32, 80), (F16, 64)])
def test_few_queries_corrected_by_the_steps(dtype, size, factors):
    call = make_call(dtype=dtype, size=size, queries=9)
    batch, heads = call.keys.shape[:2]
    found = draw(batch, heads, 4, seed=7)[..., :1].abs().to(DEVICE) if factors else None
    call = dataclasses.replace(
        call, extra_query=None, extra_keys=None, by_steps=True, factors=found
    )
    got, lse = attend_kernel.attend_packed(call)
    want, want_lse = attend_reference.attend_packed(call)
    tolerance = 1e-5 if dtype == F32 else 3e-3
    assert off(got, want) < tolerance and off(lse, want_lse) < tolerance
