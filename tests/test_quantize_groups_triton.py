"""The quantization kernel gives the bits of the reference; E4M3 and BF16 rounding in a kernel."""

import pytest
import torch

from videokv.kernels import gpu
from videokv.kernels.assign_centroids import Clusters
from videokv.kernels.pack_codes import pack, unpack
from videokv.kernels.quantize_groups import _self_check, quantize_packed, reference
from videokv.rotation import Rotation
from videokv.tensors import E4M3, GroupFormat

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from videokv.kernels import numbers  # noqa: E402
from videokv.kernels.quantize_groups import triton as kernel  # noqa: E402

AWAY = torch.tensor([2, 0, 2, 1, 1, 0, 1, 2], dtype=torch.uint8)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, F32 = torch.float16, torch.float32
FORMATS = {
    "rtn2": (GroupFormat(2, 32), 64),
    "rtn2-odd": (GroupFormat(2, 16), 80),
    "rtn3": (GroupFormat(3, 16), 80),
    "rtn4": (GroupFormat(4, 64, scale_dtype=F16, zero_dtype=F16), 128),
    "rtn8": (GroupFormat(8, 32), 96),
    "integer": (GroupFormat(2, 32, zero_point="integer"), 64),
    "ternary": (GroupFormat(2, 64, symmetric=True), 64),
    "symmetric4": (GroupFormat(4, 32, symmetric=True, scale_dtype=F32), 64),
    "kivi": (GroupFormat(2, 32, axis="channel"), 72),
    "kivi-integer": (GroupFormat(4, 16, axis="channel", zero_point="integer"), 64),
}


def draw(*shape, seed=0, dtype=F32):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    values[..., 3] += 30
    return values.to(dtype).to(DEVICE)


def bits(x):
    return None if x is None else x.contiguous().view(torch.uint8)


def same(got, x, format):
    want, facts = reference.quantize(x, format=format)
    raw, got_facts = got
    assert not facts[3], "the test data needs a normaliser"
    assert torch.equal(raw.packed, pack(want.codes, bits=format.bits))
    assert torch.equal(bits(raw.steps), bits(want.steps))
    if want.zeros is None:
        assert raw.zeros is None
    else:
        assert torch.equal(bits(raw.zeros), bits(want.zeros.to(raw.zeros.dtype)))
    assert got_facts == reference.Facts(*facts.tolist())


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_same_bits_as_the_reference(name, dtype):
    format, size = FORMATS[name]
    x = draw(2, 2, 67, size, dtype=dtype)
    same(kernel.quantize(x, format=format, rotation=None), x, format)


@pytest.mark.parametrize(("size", "group"), [(128, 32), (64, 16), (64, 64), (32, 16)])
def test_rotated_groups_in_lanes_are_those_of_rotated_tokens(size, group):
    x, format, rotation = draw(2, 2, 150, size, dtype=F16), GroupFormat(2, group), Rotation(size)
    got, got_facts = kernel.quantize(x, format=format, rotation=rotation)
    want, facts = reference.quantize(rotation.apply(x.float()), format=format)
    codes = pack(want.codes, bits=2)
    assert float((got.packed != codes).float().mean()) < 5e-3
    assert float((got.steps.float() != want.steps.float()).float().mean()) < 5e-3
    assert float((got.zeros.float() - want.zeros.float()).abs().max()) < 0.05
    assert got_facts.magnitude == pytest.approx(float(facts[0]), rel=1e-5)
    assert got_facts.normalised == 0


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("scale", [1.0, 1e-5])
@pytest.mark.parametrize("name", FORMATS)
def test_the_reference_gives_the_bits_of_the_cpu_on_a_gpu(name, scale):
    """PyTorch multiplies by reciprocals of Python numbers there, which is a bit off."""
    format, size = FORMATS[name]
    x = draw(2, 3, 300, size) * scale
    ours, facts = reference.quantize(x, format=format)
    theirs, want_facts = reference.quantize(x.cpu(), format=format)
    for field in ("codes", "steps", "zeros", "normaliser"):
        got, want = getattr(ours, field), getattr(theirs, field)
        assert (got is None) == (want is None)
        assert got is None or torch.equal(bits(got).cpu(), bits(want)), field
    assert torch.equal(facts.cpu(), want_facts)


def test_zero_has_no_sign():
    """Neither steps of groups of -0 nor zero points: kernels read the bytes of steps."""
    for format in (GroupFormat(2, 32, symmetric=True), GroupFormat(2, 32, zero_point="integer")):
        x = draw(1, 1, 9, 64).abs() * torch.tensor(-0.0, device=DEVICE)
        x[:, :, 5:, ::2] += 1.0
        x[:, :, 7:] += 0.25
        raw, _ = kernel.quantize(x, format=format)
        want, _ = reference.quantize(x, format=format)
        for got in (raw.steps, want.steps, raw.zeros, want.zeros):
            assert got is None or not bool(torch.signbit(got.float())[got.float() == 0].any())
        same(kernel.quantize(x, format=format), x, format)


@pytest.mark.parametrize("tokens", [1, 63, 129])
@pytest.mark.parametrize("name", ["rtn2", "kivi"])
def test_token_counts_and_strides(name, tokens):
    format, size = FORMATS[name]
    x = draw(1, tokens, 3, 2, size)[:, :, 1].transpose(1, 2)  # [B, H, T, D] inside [B, T, 3, H, D]
    assert tokens == 1 or not x.is_contiguous()
    same(kernel.quantize(x, format=format, rotation=None), x, format)


@pytest.mark.parametrize("zero_point", ["offset", "integer"])
def test_constant_groups(zero_point):
    format = GroupFormat(2, 32, zero_point=zero_point)
    x = draw(1, 1, 20, 64)
    x[:, :, 3:9] = 5.0
    x[:, :, 9:11] = 0.0
    same(kernel.quantize(x, format=format, rotation=None), x, format)


def test_a_rotation_is_fused():
    format, rotation = GroupFormat(2, 32), Rotation(64, seed=3)
    x = draw(1, 2, 40, 64, dtype=F16)
    raw, _ = kernel.quantize(x, format=format, rotation=rotation)
    turned = rotation.apply(x.double()).float()
    want, _ = reference.quantize(turned, format=format)
    unlike = (raw.packed != pack(want.codes, bits=2)).float().mean()
    assert unlike < 5e-3


@pytest.mark.parametrize("bits_", [2, 4])
def test_centroids_are_subtracted_and_halves_go_away_from_zero(bits_):
    format = GroupFormat(bits_, 32, symmetric=True)
    x = draw(1, 2, 67, 64, dtype=F16)
    table = draw(1, 2, 5, 64, seed=1).bfloat16()
    ids = (torch.arange(67) % 5).to(torch.uint8).expand(1, 2, -1).contiguous().to(DEVICE)
    clusters = Clusters(ids, table)
    raw, facts = kernel.quantize(x, format=format, clusters=clusters, away=True)
    residual = x.float() - clusters.gather()
    want, want_facts = reference.quantize(residual, format=format)
    codes = reference.away_from_zero(residual, want, format=format)
    assert torch.equal(raw.packed, pack(codes, bits=bits_))
    assert torch.equal(bits(raw.steps), bits(want.steps))
    assert facts == reference.Facts(*want_facts.tolist())
    halves = torch.tensor([0.5, -0.5, 1.0, 0.25, -0.25, -1.0, 0.0, 0.75]).repeat(8)
    x = halves.expand(1, 1, 3, 64).to(DEVICE)
    raw, _ = kernel.quantize(x, format=GroupFormat(2, 32, symmetric=True), away=True)
    assert torch.equal(unpack(raw.packed, bits=2, count=64)[0, 0, 0, :8].cpu(), AWAY)


def test_facts_tell_of_what_is_not_finite_and_of_normalisers():
    format = GroupFormat(2, 32)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = draw(1, 2, 9, 64)
        x[0, 1, 4, 5] = bad
        facts = kernel.quantize(x, format=format, rotation=None)[1]
        assert not facts[0] < 1e37
    assert kernel.quantize(draw(1, 2, 9, 64) * 5000, format=format, rotation=None)[1][3] == 1
    assert kernel.quantize(draw(1, 2, 9, 64) * 1e-5, format=format, rotation=None)[1][3] == 1


def test_the_call_uses_the_kernel_and_leaves_normalisers_to_the_reference(monkeypatch):
    monkeypatch.setattr(gpu, "_verdicts", {})
    monkeypatch.setattr("videokv.kernels.quantize_groups.machine_refusal", lambda device: None)
    wanted = "videokv.kernels.quantize_groups.wants_kernels"
    format = GroupFormat(2, 32)
    for scale in (1.0, 1e-5):
        x = draw(1, 2, 9, 64) * scale
        monkeypatch.setattr(wanted, lambda device: False)
        want = quantize_packed(x.cpu(), format=format)
        monkeypatch.setattr(wanted, lambda device: True)
        got = quantize_packed(x, format=format)
        assert torch.equal(got.packed.cpu(), want.packed)
        assert (got.normaliser is None) == (want.normaliser is None)
    x[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="keys of layer 7"):
        quantize_packed(x, format=format, what="keys", layer=7)


@triton.jit
def _round_trip(x, bytes_out, values_out, bf16_out, N: tl.constexpr):
    place = tl.arange(0, N)
    values = tl.load(x + place)
    code = numbers.encode_e4m3(values)
    tl.store(bytes_out + place, code)
    tl.store(values_out + place, numbers.decode_e4m3(code & 0x7F))
    tl.store(bf16_out + place, numbers.round_bf16(values))


def test_e4m3_and_bf16_round_as_pytorch_does():
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    every = every[torch.isfinite(every)]
    middles = (every.sort().values[1:] + every.sort().values[:-1]) / 2
    random = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -5, 3, 3000
    )
    x = torch.cat([every, middles, random, torch.tensor([1e9, -1e9, 448.0, 464.0, 0.0, -0.0])])
    x = torch.nn.functional.pad(x, (0, 4096 - len(x))).to(DEVICE)
    codes = torch.empty(4096, dtype=torch.uint8, device=DEVICE)
    values, halves = torch.empty(4096, device=DEVICE), torch.empty(4096, device=DEVICE)
    _round_trip[(1,)](x, codes, values, halves, N=4096)
    want = x.cpu().clamp(-448, 448).to(E4M3)
    assert torch.equal(codes.cpu(), want.view(torch.uint8))
    assert torch.equal(values.cpu(), want.float().abs())
    assert torch.equal(halves.cpu(), x.cpu().bfloat16().float())


@pytest.mark.parametrize("kind", ["plain", "centroids", "rotation"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_self_check_passes_on_a_corner_of_many_rows_and_heads(name, kind):
    format, size = FORMATS[name]
    if kind == "rotation" and (format.axis == "channel" or size & (size - 1)):
        pytest.skip("the kernel refuses it")
    x = draw(3, 5, 33, size, dtype=F16)
    clusters = rotation = None
    if kind == "centroids":
        ids = torch.arange(3 * 5 * 33).reshape(3, 5, 33).remainder(7).to(torch.uint8).to(DEVICE)
        clusters = Clusters(ids, draw(3, 5, 7, size, seed=1).bfloat16())
    if kind == "rotation":
        rotation = Rotation(size, seed=3)
    assert _self_check(x, format, rotation, clusters, format.symmetric) is None
