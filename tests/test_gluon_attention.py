"""The Gluon kernel for Hopper against float64, on odd sizes; it runs on such a GPU alone.

What a call must look like for it is checked on the CPU too.
"""

import importlib
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from videokv.kernels import attend as room
from videokv.kernels import gpu
from videokv.kernels.attend import Call, Rows, attend, reference, served_by, to_e4m3
from videokv.recipes import recipe

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, SCALE = 128, 128**-0.5
SIZES = (
    # heads, KV heads, queries, past, current, columns
    (2, 2, 77, 333, 77, 16),
    (4, 2, 300, 1000, 0, 16),
    (2, 2, 130, 0, 200, 0),
    (6, 3, 4680, 1001, 77, 4),
    (1, 1, 65, 3, 1, 0),
    (1, 1, 129, 129, 1025, 1),
    (24, 8, 1560, 4099, 1560, 8),
)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def draw(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers in BF16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)


def make_call(
    heads: int,
    kv_heads: int,
    queries: int,
    past: int,
    current: int,
    columns: int,
    *,
    narrow: bool,
    batch: int = 1,
) -> Call:
    """As a cache makes it: keys with 16 spare channels, E4M3 values with tokens side by side."""
    room = -(-past // 16) * 16
    wide_query = draw(batch, heads, queries, SIZE + 16, seed=1)
    wide_keys = draw(batch, kv_heads, max(room, 1), SIZE + 16, seed=2)[:, :, :past]
    old, extra = None, (None, None)
    if past:
        values, scale = draw(batch, kv_heads, past, SIZE, seed=3), None
        if narrow:
            small, scale = to_e4m3(values)
            turned = torch.zeros(batch, kv_heads, SIZE, room, device=DEVICE, dtype=small.dtype)
            turned.view(torch.uint8)[..., :past] = small.mT.contiguous().view(torch.uint8)
            values = turned.mT[:, :, :past]
        old = Rows(wide_keys[..., :SIZE], values, None, scale)
        if columns:
            extra = tuple(x[..., SIZE : SIZE + columns] for x in (wide_query, wide_keys))
    new = Rows(*(draw(batch, kv_heads, current, SIZE, seed=s) for s in (4, 5))) if current else None
    return Call(wide_query[..., :SIZE], old, new, SCALE, *extra)


def off(got: Tensor, want: Tensor) -> float:
    """Relative error in norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def compare(call: Call, *, narrow: bool) -> None:
    """Output and log-sum-exp against float64 on the same numbers."""
    assert served_by(call) == "gluon"
    want, want_lse = reference.attend(replace(call, query=call.query.double()))
    got, got_lse = attend(call)
    assert off(got, want) < (4e-2 if narrow else 1e-2)
    assert float((got_lse.double() - want_lse.double()).abs().max()) < 1e-2


@on_hopper
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_against_float64(sizes: tuple[int, ...], narrow: bool) -> None:
    compare(make_call(*sizes, narrow=narrow), narrow=narrow)


@on_hopper
@pytest.mark.parametrize("narrow", [False, True])
def test_batches(narrow: bool) -> None:
    compare(make_call(4, 2, 200, 301, 77, 16, narrow=narrow, batch=3), narrow=narrow)


@on_hopper
@pytest.mark.parametrize("where", ["past", "current", "a row", "values", "values of both signs"])
def test_weights_far_above_those_of_the_first_block(where: str) -> None:
    """BF16 weights have the first block's largest score as their base: 2^300 of it is not float32,
    and neither are sums of values of 1e30 with weights of 2^80."""
    call = make_call(4, 2, 300, 1000, 500, 16, narrow=False)
    assert call.past is not None and call.current is not None
    query, keys, current = call.query.clone(), call.past.keys.clone(), call.current.keys.clone()
    values = call.past.values.clone()
    query[:, 1, 70] = 4.0
    if where == "past":
        keys[:, :, 700] = 6.0  # a weight of 2^391
    elif where == "current":
        current[:, 0, 400:] = 5.0
    elif where == "a row":
        query[:, 3, 150] = 3.0
        keys[:, 1, 900:] = 4.0
    elif where == "values":
        keys[:, 0, 700] = 1.2
        values[:, 0, 700] = 1e30
    else:  # one channel becomes inf, then NaN, while all others stay finite
        keys[:, 0, 300], keys[:, 0, 450] = 1.2, 1.2
        values[:, 0, 300, 5], values[:, 0, 450, 5] = 1e30, -5e29
    past, new = replace(call.past, keys=keys, values=values), replace(call.current, keys=current)
    call = replace(call, query=query, past=past, current=new)
    _, lse = importlib.import_module("videokv.kernels.attend.hopper").attend(call)
    assert not bool(lse.isfinite().all())  # or the case tests nothing
    compare(call, narrow=False)


@on_hopper
def test_the_same_bits_every_time() -> None:
    call = make_call(12, 12, 2000, 4680, 1000, 16, narrow=True)
    first, first_lse = attend(call)
    for _ in range(3):
        again, again_lse = attend(call)
        assert torch.equal(first, again) and torch.equal(first_lse, again_lse)


@on_hopper
def test_queries_as_a_model_gives_them() -> None:
    """[B, T, H, D] seen as [B, H, T, D]; and channels that do not lie side by side."""
    call = make_call(4, 4, 300, 500, 77, 0, narrow=False)
    query = draw(1, 300, 4, SIZE, seed=9).transpose(1, 2)
    compare(replace(call, query=query), narrow=False)
    query = draw(1, 4, SIZE, 300, seed=9).mT
    compare(replace(call, query=query), narrow=False)


@on_hopper
def test_rows_past_its_end_are_never_seen() -> None:
    """NaN behind the last key and value of a buffer."""
    call = make_call(2, 2, 200, 333, 77, 16, narrow=True)
    assert call.past is not None
    base = call.past.keys
    whole = torch.as_strided(base, (1, 2, 336, 144), base.stride(), base.storage_offset())
    whole[:, :, 333:] = torch.nan
    compare(call, narrow=True)


@on_hopper
@pytest.mark.parametrize("backend", ["triton", "triton-fp8"])
@pytest.mark.parametrize("heads", [(12, 12), (24, 8)])
def test_through_a_cache(backend: str, heads: tuple[int, int]) -> None:
    """Against eager attention on what the cache decodes, tokens not in fours."""
    cache = recipe("quarot-2bit+calibrated", backend=backend).new_cache(layers=1)
    for number in range(3):
        k, v = (draw(1, heads[1], 333, SIZE, seed=10 * number + i) for i in (1, 2))
        q = draw(1, heads[0], 333, SIZE, seed=10 * number)
        cache.write(0, 333 * number, k, v, q)
        cache.commit(333 * (number + 1))
    q, (k, v) = (
        draw(1, heads[0], 500, SIZE, seed=99),
        (draw(1, heads[1], 500, SIZE, seed=s) for s in (97, 98)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a fallback would say so
        got = cache.attend(0, q, k, v)
    from videokv.attention import attend as attend_segments
    from videokv.protocols import Segment

    segments = [Segment(s.keys, s.values, s.noise, packed=s.packed) for s in cache.view(0)]
    want, _ = attend_segments(q, [*segments, Segment(k, v)], backend="eager")
    assert off(got, want) < (4e-2 if backend == "triton-fp8" else 1e-2)


@on_hopper
def test_in_a_captured_graph() -> None:
    call = make_call(12, 12, 700, 1000, 300, 16, narrow=True)
    attend(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attend(call)
    call.query.copy_(draw(*call.query.shape, seed=77))
    graph.replay()
    assert torch.equal(out, attend(call)[0])


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch):
    """As on a Hopper GPU; checks of kernels pass."""
    pytest.importorskip("triton")
    monkeypatch.setattr(gpu, "_verdicts", {})
    monkeypatch.setattr(room, "machine_refusal", lambda device: None)
    monkeypatch.setattr(room, "checked_refusal", lambda *given: None)
    monkeypatch.setattr(room, "_capability", lambda device: (9, 0))
    room._gluon_missing.cache_clear()
    yield
    room._gluon_missing.cache_clear()


def _gluon() -> bool:
    try:
        importlib.import_module("videokv.kernels.attend.hopper")
    except Exception:  # noqa: BLE001 - another Triton's Gluon
        return False
    return True


@pytest.mark.parametrize("narrow", [False, True])
def test_what_it_serves(hopper, narrow: bool) -> None:
    if not _gluon():
        pytest.skip("this Triton has another Gluon")
    assert served_by(make_call(2, 2, 77, 333, 77, 16, narrow=narrow)) == "gluon"
    assert served_by(make_call(2, 2, 64, 333, 77, 16, narrow=narrow)) == "triton"


@pytest.mark.parametrize("what", ["float16", "size", "columns", "causal", "scale", "gap", "fours"])
def test_what_it_leaves_to_triton(hopper, what: str) -> None:
    if not _gluon():
        pytest.skip("this Triton has another Gluon")
    call = make_call(2, 2, 77, 333, 77, 16, narrow=True)
    past, current = call.past, call.current
    assert past is not None and current is not None
    odd = {
        "float16": lambda: replace(call, query=call.query.half()),
        "size": lambda: replace(call, query=call.query[..., :64]),
        "columns": lambda: replace(
            call, extra_query=draw(1, 2, 77, 17, seed=1), extra_keys=draw(1, 2, 333, 17, seed=1)
        ),
        "causal": lambda: replace(call, causal=True),
        "scale": lambda: replace(call, scale=-0.1),
        "gap": lambda: replace(call, current=replace(current, keys=draw(1, 2, 128, 77, seed=1).mT)),
        "fours": lambda: replace(
            call, past=replace(past, keys=past.keys.contiguous()), extra_keys=None, extra_query=None
        ),
    }
    assert served_by(odd[what]()) == "triton"


def test_rows_that_are_one_in_memory_are_copied_first() -> None:
    if not _gluon():
        pytest.skip("this Triton has another Gluon")
    hopper = importlib.import_module("videokv.kernels.attend.hopper")
    query = draw(1, 2, 200, SIZE, seed=1)
    assert hopper._movable(query) and not hopper._movable(query.expand(3, -1, -1, -1))


@pytest.mark.parametrize("shape", ["heads first", "columns first"])
def test_columns_are_laid_out_for_it(shape: str) -> None:
    """A copy that pads nothing would keep strides that the copy engine does not follow."""
    if not _gluon():
        pytest.skip("this Triton has another Gluon")
    hopper = importlib.import_module("videokv.kernels.attend.hopper")
    x = draw(3, 2, 8, 16, seed=1).transpose(0, 1)
    if shape == "columns first":
        x = draw(2, 3, 16, 8, seed=1).mT
    got = hopper._padded(x)
    assert hopper._movable(got) and hopper._in_fours(got) and torch.equal(got, x)


def test_a_missing_gluon_is_said_once(hopper, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("no such name")

    monkeypatch.setattr(room, "_hopper", missing)
    gpu.say_once.cache_clear()
    call = make_call(2, 2, 77, 333, 77, 16, narrow=False)
    with pytest.warns(UserWarning, match="slower Triton kernel.*no such name"):
        assert served_by(call) == "triton"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert served_by(call) == "triton"


def test_one_that_marks_every_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernel does such rows again: the output is right, and late."""

    class Marking:
        @staticmethod
        def attend(call: Call) -> tuple[Tensor, Tensor]:
            out, lse = reference.attend(call)
            return out, torch.full_like(lse, torch.inf)

    class Again:
        @staticmethod
        def attend(call: Call, *, tile: object, into: tuple[Tensor, Tensor]) -> None:
            for kept, right in zip(into, reference.attend(call), strict=True):
                kept.copy_(right)

    monkeypatch.setattr(room, "_hopper", lambda: Marking)
    monkeypatch.setattr(room, "_kernel", lambda: Again)
    call = make_call(2, 2, 77, 333, 77, 16, narrow=False)
    assert "every row" in str(room._self_check(call, by_gluon=True))
