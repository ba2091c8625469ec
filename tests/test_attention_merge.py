"""Merging by log-sum-exp, empty rows included (-inf, and +inf of some kernels)."""

import pytest
import torch
from attention_fakes import Draw, relative_error

from videokv.attention import attend, merge_parts
from videokv.protocols import Segment

INF = float("inf")


@pytest.mark.parametrize("tokens", [(1, 63), (127, 1, 1000)])
def test_merge_equals_one_pass(tokens):
    draw = Draw(0)
    query = draw.normal(2, 6, 9, 80)
    segments = [draw.segment((2, 2, t, 80), 40) for t in tokens]
    parts = [attend(query, [s], need_lse=True) for s in segments]
    out, lse = merge_parts(parts)
    want, want_lse = attend(query, segments, need_lse=True)
    assert relative_error(out, want) < 1e-5
    assert relative_error(lse, want_lse) < 1e-6


@pytest.mark.parametrize("empty", [-INF, INF])
def test_rows_without_keys(empty):
    draw = Draw(1)
    out, lse = draw.normal(1, 2, 5, 8), draw.normal(1, 2, 5)
    none = torch.full_like(out, float("nan"))
    none_lse = torch.full_like(lse, empty)
    merged, merged_lse = merge_parts([(none, none_lse), (out, lse)])
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse)

    both, both_lse = merge_parts([(none, none_lse), (none, none_lse)])
    assert torch.equal(both, torch.zeros_like(out)) and bool((both_lse == -INF).all())
    again, again_lse = merge_parts([(both, both_lse), (out, lse)])
    assert torch.equal(again, out) and torch.equal(again_lse, lse)


def test_one_masked_row_leaves_the_others():
    draw = Draw(2)
    parts = [(draw.normal(1, 2, 5, 8), draw.normal(1, 2, 5)) for _ in range(2)]
    want, want_lse = merge_parts(parts)
    masked = []
    for out, lse in parts:
        lse = lse.clone()
        lse[:, :, 3] = -INF
        masked.append((out, lse))
    out, lse = merge_parts(masked)
    keep = [0, 1, 2, 4]
    assert torch.equal(out[:, :, keep], want[:, :, keep])
    assert torch.equal(lse[:, :, keep], want_lse[:, :, keep])
    assert bool((out[:, :, 3] == 0).all()) and bool((lse[:, :, 3] == -INF).all())


def test_large_log_sum_exps_do_not_overflow():
    ones = torch.ones(1, 1, 2, 4)
    out, lse = merge_parts(
        [(ones, torch.full((1, 1, 2), 9e4)), (-ones, torch.full((1, 1, 2), 9e4))]
    )
    assert torch.equal(out, torch.zeros_like(ones))
    assert bool(torch.isfinite(lse).all())


def test_dtype_is_kept_and_bad_parts_are_refused():
    half = torch.ones(1, 1, 2, 4, dtype=torch.bfloat16)
    out, lse = merge_parts([(half, torch.zeros(1, 1, 2))] * 2)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    with pytest.raises(ValueError, match="at least one"):
        merge_parts([])
    with pytest.raises(ValueError, match="of one shape"):
        merge_parts([(half, torch.zeros(1, 1, 3))])


def test_no_keys_at_all():
    query = torch.ones(1, 2, 3, 8)
    nothing = Segment(torch.ones(1, 1, 0, 8), torch.ones(1, 1, 0, 6))
    out, lse = attend(query, [nothing], need_lse=True)
    assert out.shape == (1, 2, 3, 6) and bool((out == 0).all()) and bool((lse == -INF).all())
