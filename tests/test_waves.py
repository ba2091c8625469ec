"""Rows of a last wave attend to parts of the keys: the same result, by fewer waves."""

import pytest
import torch

from videokv.attention.merge import merge_parts
from videokv.attention.stock_kernels import KernelChoice, choose_kernel, left_out
from videokv.attention.waves import Split, best_split, run_split, split_for
from videokv.kernels import gpu
from videokv.kernels import merge_tail as room
from videokv.kernels.merge_tail import merge_tail

pytest.importorskip("triton")
from videokv.kernels.merge_tail import triton as kernel  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@pytest.fixture(params=["reference", "kernel"])
def merge(request, monkeypatch):
    """The merge by PyTorch, and by the kernel (through its interpreter where there is no GPU)."""
    monkeypatch.setattr(gpu, "_verdicts", {})
    found = None if request.param == "kernel" else "asked for"
    launches, honest = [], kernel.merge_tail
    monkeypatch.setattr(room, "machine_refusal", lambda device: found)
    monkeypatch.setattr(kernel, "merge_tail", lambda *x: launches.append(x) or honest(*x))
    yield merge_tail
    assert bool(launches) == (request.param == "kernel")


def _draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def _waves(split: Split | None, *, rows: int, heads: int, processors: int) -> float:
    blocks = -(-rows // 128)
    if split is None:
        return -(-blocks * heads // processors)
    first = split.rows // 128
    rest = -(-(blocks - first) * heads * split.parts // processors) / split.parts
    return -(-first * heads // processors) + rest


def test_a_layer_of_a_video_model_takes_fewer_waves() -> None:
    split = best_split(rows=4680, heads=12, tokens=32760, tile=128, processors=132)
    assert split is not None and split.rows == 33 * 128 and 32760 % split.parts == 0
    assert _waves(split, rows=4680, heads=12, processors=132) < 3.5 < 4


@pytest.mark.parametrize("heads", [1, 2, 7, 12, 24, 40])
@pytest.mark.parametrize("rows", [1, 128, 129, 1560, 4680, 9360])
@pytest.mark.parametrize("tokens", [1, 97, 4680, 32760, 126360])
def test_no_split_costs_more_than_none(heads: int, rows: int, tokens: int) -> None:
    split = best_split(rows=rows, heads=heads, tokens=tokens, tile=128, processors=132)
    if split is not None:
        assert 0 < split.rows < rows and split.rows % 128 == 0 and tokens % split.parts == 0
        whole = _waves(None, rows=rows, heads=heads, processors=132)
        assert _waves(split, rows=rows, heads=heads, processors=132) < split.cost < 0.96 * whole


def test_primes_and_full_waves_are_left_alone() -> None:
    assert best_split(rows=4680, heads=12, tokens=32749, tile=128, processors=132) is None
    assert best_split(rows=11 * 128, heads=12, tokens=32760, tile=128, processors=132) is None


@pytest.mark.parametrize("heads_per_kv", [1, 3])
@pytest.mark.parametrize("parts", [2, 5])
def test_split_equals_the_whole(heads_per_kv: int, parts: int) -> None:
    """On keys with spare channels behind them, values wider than nothing else, odd rows."""
    dtype = torch.float16 if CUDA else torch.float32
    query = _draw(1, 2 * heads_per_kv, 300, 144, seed=0, dtype=dtype)
    keys = _draw(1, 2, 330, 160, seed=1, dtype=dtype)[..., :144]
    values = _draw(1, 2, 330, 128, seed=2, dtype=dtype)
    choice = choose_kernel(
        device=DEVICE,
        dtype=dtype,
        head_dim=144,
        value_dim=128,
        heads_per_kv=heads_per_kv,
        rows=300,
        tokens=330,
    )
    assert isinstance(choice, KernelChoice)
    values = torch.nn.functional.pad(values, (0, choice.value_dim - 128))
    whole, whole_lse = choice.run(query, keys, values, scale=0.1, causal=False)
    out, lse = run_split(choice.run, query, keys, values, Split(128, parts, 0.0), scale=0.1)
    tolerance = 2e-3 if CUDA else 2e-6
    torch.testing.assert_close(out, whole, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, whole_lse, atol=tolerance, rtol=tolerance)


def test_batches_and_other_kernels_are_not_split() -> None:
    query, keys = torch.empty(2, 12, 4680, 128), torch.empty(2, 12, 32760, 128)
    assert split_for("fa4", query.to("meta"), keys.to("meta"), keys.to("meta")) is None
    if CUDA:
        big = torch.empty(1, 12, 4680, 128, device="cuda")
        assert split_for("flash", big, big, big) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (3, 2, 37, 80), (8, 3, 65, 128)])
@pytest.mark.parametrize("rows", [1, 50])
def test_merge_against_float64(merge, dtype, shape, rows) -> None:
    parts, lses = _draw(*shape, seed=3, dtype=dtype), _draw(*shape[:3], seed=4) * 3
    # As kernels give them: tokens, then heads.
    first = _draw(1, rows, shape[1], shape[3], seed=5, dtype=dtype).transpose(1, 2)
    first_lse = _draw(1, rows, shape[1], seed=6).transpose(1, 2)
    out, lse = merge(first, first_lse, parts, lses)
    assert torch.equal(out[:, :, :rows], first) and torch.equal(lse[:, :, :rows], first_lse)
    weights = (lses.double() - lses.double().logsumexp(0)).exp()
    want = (weights[..., None] * parts.double()).sum(0, keepdim=True)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(out[:, :, rows:].double(), want, atol=tolerance, rtol=tolerance)
    want = lses.double().logsumexp(0, keepdim=True)
    torch.testing.assert_close(lse[:, :, rows:].double(), want, atol=1e-5, rtol=1e-5)


def test_rows_without_keys(merge) -> None:
    """Kernels say -inf or +inf of them and leave whatever in their output."""
    parts, lses = _draw(3, 1, 4, 16, seed=5), _draw(3, 1, 4, seed=6)
    parts[0, 0, 0], lses[0, 0, 0] = torch.nan, -torch.inf
    parts[1, 0, 1], lses[1, 0, 1] = torch.inf, torch.inf
    parts[:, 0, 2], lses[:, 0, 2] = torch.nan, -torch.inf
    out, lse = merge(_draw(1, 1, 2, 16, seed=7), _draw(1, 1, 2, seed=8), parts, lses)
    want, want_lse = merge_parts([(parts[i : i + 1], lses[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(out[:, :, 2:], want)
    torch.testing.assert_close(lse[:, :, 2:], want_lse)
    assert not out[0, 0, 4].any() and lse[0, 0, 4] == -torch.inf


def test_what_is_not_a_number_stays_so(merge) -> None:
    parts, lses = _draw(3, 1, 4, 16, seed=5), _draw(3, 1, 4, seed=6)
    lses[1, 0, 2] = torch.nan
    out, lse = merge(_draw(1, 1, 2, 16, seed=7), _draw(1, 1, 2, seed=8), parts, lses)
    assert out[0, 0, 4].isnan().all() and lse[0, 0, 4].isnan()
    assert out[0, 0, [2, 3, 5]].isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    first, parts = torch.zeros(1, 1, 5, 8), torch.zeros(2, 1, 3, 8)
    with pytest.raises(ValueError, match=r"expects outputs \[1, H, N, Dv\]"):
        merge_tail(first, torch.zeros(1, 1, 5), parts, torch.zeros(2, 1, 4))
    with pytest.raises(ValueError, match=r"expects outputs \[1, H, N, Dv\]"):
        merge_tail(first.half(), torch.zeros(1, 1, 5), parts, torch.zeros(2, 1, 3))


def test_a_kernel_is_left_out_and_back_again() -> None:
    sizes = {"device": torch.device("cpu"), "dtype": torch.float32, "head_dim": 64}
    sizes |= {"value_dim": 64, "heads_per_kv": 1, "rows": 5, "tokens": 7}
    assert isinstance(choose_kernel(**sizes), KernelChoice)
    with left_out("cpu"):
        assert "no stock kernel" in str(choose_kernel(**sizes))
    assert isinstance(choose_kernel(**sizes), KernelChoice)
    with pytest.raises(ValueError, match="unknown stock kernel"), left_out("cpus"):
        pass
