"""One buffer for all rows of a layer: same attention, no joining, columns written in place."""

import pytest
import torch
from attention_fakes import Draw

import videokv
from videokv.attention import attend
from videokv.attention.columns import ColumnCall, with_columns
from videokv.cache import cache as cache_module
from videokv.protocols import Segment


def run(name, monkeypatch, *, gather, chunks=4, tokens=24):
    monkeypatch.setattr(cache_module, "worth_gathering", lambda device: gather)
    generator = torch.Generator().manual_seed(0)
    cache = videokv.recipe(name, sink_chunks=1).new_cache(layers=1)
    outputs = []
    for chunk in range(chunks):
        q, k, v = (torch.randn(1, heads, tokens, 64, generator=generator) for heads in (4, 2, 2))
        cache.write(0, chunk * tokens, k, v, q)
        outputs.append(cache.attend(0, q, k, v))
        cache.commit((chunk + 1) * tokens)
    return outputs, cache


@pytest.mark.parametrize("name", ["rtn-2bit", "quarot-2bit+calibrated", "quantwm-2bit+taylor"])
def test_gathered_rows_give_the_same_attention(name, monkeypatch):
    want, plain = run(name, monkeypatch, gather=False)
    got, gathered = run(name, monkeypatch, gather=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert gathered.decode_calls == plain.decode_calls
    assert gathered.memory().workspace_peak_bytes >= plain.memory().workspace_peak_bytes > 0


def test_current_rows_may_stay_where_they_are(monkeypatch):
    _, cache = run("quarot-2bit+calibrated", monkeypatch, gather=True)
    q, k, v = (torch.randn(1, heads, 24, 64) for heads in (4, 2, 2))
    held, now = cache._layers[0], Segment(k, v)
    *past, last = held.gathered(now, apart=True)
    assert last is now and sum(s.keys.shape[2] for s in past) == 96
    want, _ = attend(q, held.gathered(now), backend="eager")
    torch.testing.assert_close(attend(q, [*past, last], backend="eager")[0], want)


@pytest.mark.parametrize("tokens", [24, 3])
@pytest.mark.parametrize("name", ["rtn-2bit+taylor", "bf16"])
def test_rows_of_a_chunk_that_were_forgotten_are_not_gathered(name, tokens, monkeypatch):
    generator = torch.Generator().manual_seed(9)
    q, k, v = (torch.randn(1, heads, tokens, 64, generator=generator) for heads in (4, 2, 2))
    outputs = []
    for gather in (False, True):
        _, cache = run(name, monkeypatch, gather=gather)
        cache.forget(30)  # the first chunk, and six rows of the second
        assert cache.visible_tokens == 96 - 30
        outputs.append(cache.attend(0, q, k, v))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [24, 2])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("name", ["rtn-2bit", "rtn-2bit+calibrated", "bf16"])
def test_current_rows_unlike_the_cache_are_refused(name, gather, tokens, monkeypatch):
    """A kernel that writes packed rows into their buffer would write past its end."""
    _, cache = run(name, monkeypatch, gather=gather)
    honest = {"batch": 1, "heads": 2, "size": 64, "value_size": 64, "query_heads": 4}
    for wrong in ({"batch": 2}, {"heads": 1}, {"heads": 4}, {"size": 32}, {"value_size": 32},
                  {"query_heads": 3}):  # fmt: skip
        to = honest | wrong
        query, key, value = (
            torch.randn(to["batch"], heads, tokens, size)
            for heads, size in (
                (to["query_heads"], to["size"]),
                (to["heads"], to["size"]),
                (to["heads"], to["value_size"]),
            )
        )
        with pytest.raises(ValueError, match="layer 0 holds batch 1, 2 key/value heads"):
            cache.attend(0, query, key, value)


def test_columns_are_written_into_spare_channels():
    draw = Draw(1)
    shape = (1, 2, 9, 64)
    loose = [draw.segment(shape, 64, draw.term(shape, 32)), draw.segment(shape, 64)]
    buffer = torch.full((1, 2, 18, 80), torch.nan)
    buffer[..., :64] = torch.cat([s.keys for s in loose], 2)
    rows = [buffer[:, :, :9, :64], buffer[:, :, 9:, :64]]
    tight = [
        Segment(keys, s.values, s.noise, spare=16) for keys, s in zip(rows, loose, strict=True)
    ]
    query = draw.normal(1, 4, 5, 64)
    pairs = []
    for segments in (loose, tight):
        call = ColumnCall(())
        for segment in segments:
            call = call.joined(segment)
        pairs.append(with_columns(query, call, scale=0.1, width=80))
    for a, b in zip(*pairs, strict=True):
        assert torch.equal(a, b)
    assert pairs[1][1].data_ptr() == buffer.data_ptr()


@pytest.mark.skipif(torch.cuda.is_available(), reason="hands CPU tensors to kernels")
@pytest.mark.parametrize(
    "name",
    [
        "rtn-2bit+calibrated",
        "quarot-2bit+taylor",
        "kivi-2bit",
        "rtn-2bit+cumulant",
        "rtn-2bit+measured",
    ],
)
def test_few_queries_read_packed_chunks(name, monkeypatch):
    pytest.importorskip("triton")
    from videokv.kernels import attend_packed as op
    from videokv.kernels import gpu

    calls = []
    kernel = op._kernel()
    honest = kernel.attend_all

    def counted(packed, other):
        calls.append(packed)
        return honest(packed, other)

    monkeypatch.setattr(kernel, "attend_all", counted)
    monkeypatch.setattr(op, "machine_refusal", lambda device: None)
    monkeypatch.setattr(gpu, "_verdicts", {})
    outputs = []
    for packed in (False, True):
        _, cache = run(name, monkeypatch, gather=False, chunks=3)
        monkeypatch.setattr(cache_module, "worth_gathering", lambda device, packed=packed: packed)
        before, decoded = len(calls), cache.decode_calls
        generator = torch.Generator().manual_seed(5)
        q, k, v = (torch.randn(1, heads, 2, 64, generator=generator) for heads in (4, 2, 2))
        outputs.append(cache.attend(0, q, k, v, causal=True))
        assert (len(calls) > before) == packed
        by_steps = name.partition("+")[2] in ("calibrated", "taylor", "measured")
        assert not packed or all(call.by_steps == by_steps for call in calls[-1])
        assert (cache.decode_calls == decoded) == packed
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("queries", "forgotten", "reason"),
    [(2, 30, "rows of the first were forgotten"), (16, 0, "more than 64 query rows")],
)
def test_few_queries_that_read_decoded_chunks_say_why(queries, forgotten, reason, monkeypatch):
    from videokv.kernels.gpu import say_once

    _, cache = run("rtn-2bit", monkeypatch, gather=True)
    cache.forget(forgotten)
    say_once.cache_clear()
    heads = 10 if queries == 16 else 4
    q, k, v = (torch.randn(1, n, queries, 64) for n in (heads, 2, 2))
    with pytest.warns(UserWarning, match=reason):
        cache.attend(0, q, k, v)
