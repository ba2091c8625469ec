"""Units here, in processes and through Ray give the same answers."""

import importlib.util
import operator

import pytest
import torch

from videokv.studies.workers import run_units


def draw(seed: int) -> tuple[float, int]:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
    return float(x.sum()), torch.get_num_threads()


def fail(seed: int) -> None:
    raise ValueError(f"unit {seed} is wrong")


ARGUMENTS = {f"u{i}": (i,) for i in range(4)}


def test_two_workers_give_the_rows_of_one() -> None:
    before = torch.get_num_threads()
    one = dict(run_units(draw, ARGUMENTS))
    assert torch.get_num_threads() == before
    assert all(threads == 1 for _, threads in one.values())
    assert dict(run_units(draw, ARGUMENTS, workers=2)) == one


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_unit_comes_out(workers: int) -> None:
    with pytest.raises(ValueError, match="is wrong"):
        list(run_units(fail, ARGUMENTS, workers=workers))


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        list(run_units(draw, ARGUMENTS, workers=0))
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(ValueError, match="--workers"):
            list(run_units(draw, ARGUMENTS, ray="local"))


def test_ray_gives_the_rows_of_one() -> None:
    pytest.importorskip("ray", reason="ray is not installed: the Ray path was not run")
    # A function of the standard library: Ray's processes cannot import this file.
    arguments = {f"u{i}": (i, 7) for i in range(4)}
    found = dict(run_units(operator.mul, arguments, ray="local"))
    assert found == dict(run_units(operator.mul, arguments))


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"workers": 2}, {"ray": "local"}], ids=["workers", "ray"])
def test_a_real_study_has_the_same_rows_wherever_it_runs(tmp_path, other) -> None:
    if "ray" in other:
        pytest.importorskip("ray", reason="ray is not installed: the Ray path was not run")
    from videokv.studies.grids import compare_variants
    from videokv.studies.rollouts import RolloutPlan, run_rollouts

    found = []
    for number, where in enumerate(({"workers": 1}, other)):
        plan = RolloutPlan(
            "compare",
            compare_variants(["rtn-2bit"]),
            tmp_path / str(number),
            clips=2,
            chunks=1,
            device="cpu",
            **where,
        )
        rows = run_rollouts(plan).rows
        found.append([row for row in rows if row.metric != "seconds_per_chunk"])
    assert found[0] == found[1]
