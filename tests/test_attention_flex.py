"""FlexAttention with the correction as score_mod, against the oracle; how often it compiles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_fakes import Draw

from videokv.attention import attend, flex, stock_kernels
from videokv.attention.stock_kernels import choose_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def relative(got, want):
    return float((got.cpu().double() - want.cpu().double()).norm() / want.double().norm())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [64, 80])
def test_equals_the_oracle(size, causal):
    if DEVICE == "cuda":
        pytest.skip("segments are drawn on the CPU")
    draw = Draw(2)
    shape = (1, 2, 19, size)
    segments = [
        draw.segment(shape, 48, draw.term(shape, size // 4)),
        draw.segment(shape, 48, draw.term(shape, size // 4, power=4)),
        draw.segment(shape, 48),
    ]
    query = draw.normal(1, 4, 19, size)
    want, want_lse = attend(query, segments, backend="eager", causal=causal, need_lse=True)
    got, lse = attend(query, segments, backend="flex", causal=causal, need_lse=True)
    assert relative(got, want) < 1e-5 and relative(lse, want_lse) < 1e-5


def test_new_values_and_lengths_compile_at_most_twice():
    in_a_process_of_its_own("count_compilations()")


def in_a_process_of_its_own(call):
    """The compiler leaves tensors without memory behind."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", f"import test_attention_flex as t; t.{call}"],
        env=os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parent}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def count_compilations():
    from torch._dynamo.testing import CompileCounter

    for causal in (False, True):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(flex.attention, dynamic=True, backend=counter)
        for tokens in [40] * 6 + [48] * 3 + [72, 56]:
            out, want = computed(compiled, tokens=tokens, causal=causal)
            assert relative(out, want) < 1e-5
        assert counter.frame_count <= 2


def computed(function, *, tokens, heads=(2, 2), rows=24, causal=False):
    """Output of ``flex.attention``, compiled or not, and what it should be."""
    draw, group = Draw(1), heads[0] // heads[1]
    q = draw.normal(1, heads[0], rows, 64)
    k, v = (draw.normal(1, heads[1], tokens, 64) for _ in range(2))
    phi, omega = draw.weights(1, heads[0], rows, 4), draw.weights(1, heads[1], tokens, 4)
    kv_head = flex._kv_heads(*heads, q.device)
    first = torch.full((), tokens - rows, dtype=torch.int32) if causal else None
    out, _ = function(q, k, v, -phi, omega, kv_head, 0.125, first)
    k, v, omega = (x.repeat_interleave(group, 1) for x in (k, v, omega))
    scores = q @ k.mT * 0.125 - phi @ omega.mT
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(tokens - rows + 1) > 0, -torch.inf)
    return out, scores.softmax(-1) @ v


def test_score_mod_captures_tensors_and_free_lengths_only():
    """A number that the compiler knows (a group of 2) cannot be lowered on a GPU."""
    in_a_process_of_its_own("look_at_captures()")


def look_at_captures():
    import sympy

    seen = []

    def backend(module, inputs):
        for node in module.graph.nodes:
            if "flex_attention" in str(node.target):
                seen.append([argument.meta["example_value"] for argument in node.args[7]])
        return module.forward

    for heads, causal in (((2, 2), False), ((4, 2), True), ((12, 3), False)):
        torch._dynamo.reset()
        compiled = torch.compile(flex.attention, dynamic=True, backend=backend)
        out, want = computed(compiled, tokens=40, heads=heads, causal=causal)
        assert relative(out, want) < 1e-5
        numbers = [x for x in seen[-1] if not isinstance(x, torch.Tensor)]
        assert len(seen[-1]) - len(numbers) == (4 if causal else 3)
        assert all(isinstance(number.node.expr, sympy.Symbol) for number in numbers), numbers


def test_exact_and_float64_are_refused():
    draw = Draw(1, torch.float64)
    shape = (1, 2, 5, 16)
    exact = draw.segment(shape, 16, draw.term(shape, 8, exact=True))
    with pytest.raises(ValueError, match="exact"):
        attend(draw.normal(1, 2, 3, 16), [exact], backend="flex")
    with pytest.raises(ValueError, match="float64"):
        attend(draw.normal(1, 2, 3, 16), [draw.segment(shape, 16)], backend="flex")


def test_fa4_is_taken_only_where_it_is_there_and_right(monkeypatch):
    sizes = {
        "dtype": torch.float32, "head_dim": 64, "value_dim": 64, "heads_per_kv": 1,
        "rows": 5, "tokens": 9, "device": torch.device("cpu"),
    }  # fmt: skip
    monkeypatch.setitem(stock_kernels._CANDIDATES, ("cpu", torch.float32), ("fa4", "cpu"))
    stock_kernels._choose.cache_clear()
    assert choose_kernel(**sizes).kernel == "cpu"  # not installed

    def right(q, k, v, scale, causal):
        scores = q @ k.mT * scale
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def wrong(q, k, v, scale, causal):
        out, lse = right(q, k, v, scale, causal)
        return out, lse * 1.4427  # base 2

    def asserting(q, k, v, scale, causal):
        raise AssertionError("head_dim is not supported")

    monkeypatch.setattr(stock_kernels, "has_fa4", lambda: True)
    for kernel, taken in ((right, "fa4"), (wrong, "cpu"), (asserting, "cpu")):
        monkeypatch.setitem(stock_kernels.KERNELS, "fa4", kernel)
        stock_kernels._choose.cache_clear()
        assert choose_kernel(**sizes).kernel == taken
    stock_kernels._choose.cache_clear()
