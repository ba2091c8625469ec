"""Each figure gives a PNG, an SVG and its data; bad data are refused."""

import json

import numpy as np
import pytest

from videokv.report.figures import attention, convexity, curves, distributions, frames, memory
from videokv.report.style import colour_of
from videokv.studies.results import Results, Row


def whole(paths) -> dict:
    png, svg, data = paths
    assert png.read_bytes()[:4] == b"\x89PNG" and b"<svg" in svg.read_bytes()[:600]
    return json.loads(data.read_text(), parse_constant=pytest.fail)


def test_convexity_has_the_bias_of_its_noise(tmp_path) -> None:
    data = whole(convexity.save_convexity(tmp_path))
    assert data["bias"] == pytest.approx(np.log(np.sinh(1.5) / 1.5))


def test_distributions(tmp_path) -> None:
    for metric in distributions.LABELS:
        data = whole(
            distributions.save_distribution({"a": [0.1, 0.2, 0.4], "b": [0.3]}, metric, tmp_path)
        )
        assert data["quantiles"]["a"]["0.5"] == 0.2 and data["quantiles"]["b"]["n"] == 1
    with pytest.raises(ValueError, match="'b'"):
        distributions.save_distribution({"a": [1.0], "b": []}, "jsd_nats", tmp_path)
    with pytest.raises(ValueError, match="metric"):
        distributions.save_distribution({"a": [1.0]}, "psnr_db", tmp_path)


def test_tradeoff_needs_points(tmp_path) -> None:
    rows = [
        Row(f"c{case}", name, metric, value + case * 0.1)
        for case in range(8)
        for name, bits, db, front in (("a", 2.0, 20.0, 1.0), ("a+taylor", 2.0, 25.0, 0.0))
        for metric, value in (
            ("bits_per_element", bits), ("psnr_db", db), ("on_pareto_front", front)
        )
    ]  # fmt: skip
    results = Results("tradeoff", "", 0, "cpu", {}, tuple(rows))
    data = whole(curves.save_tradeoff_curve(results, tmp_path))
    assert [p["recipe"] for p in data["points"]] == ["a", "a+taylor"] and data["points"][0]["sem"]
    with pytest.raises(ValueError, match="lpips_alex"):
        curves.save_tradeoff_curve(results, tmp_path, metric="lpips_alex")


def test_curves_by_chunk_and_energy(tmp_path) -> None:
    rows = [Row(f"chunk-00{i}", "bf16", "nll", 2.0 + i) for i in (1, 2)]
    rows += [Row("clip-000", "a", f"psnr_chunk_0{i}_db", 30.0 - i) for i in (1, 2)]
    results = Results("x", "", 0, "cpu", {}, tuple(rows))
    nll = curves.nll_by_chunk(results)
    assert nll == {"bf16": [3.0, 4.0]}
    assert curves.by_chunk(results, "psnr_db") == ({"a": [29.0, 28.0]}, {})
    rows = [Row(f"clip-{n}", "a", f"sharpness_chunk_0{i}", n + i) for n in range(8) for i in (1, 2)]
    means, errors = curves.by_chunk(Results("x", "", 0, "cpu", {}, tuple(rows)), "sharpness")
    assert means == {"a": [4.5, 5.5]} and errors["a"] == pytest.approx([0.866, 0.866], abs=1e-3)
    drawn = whole(curves.save_by_chunk(means, tmp_path, metric="sharpness", errors=errors))
    assert drawn["errors"] == errors
    assert whole(curves.save_by_chunk(nll, tmp_path, metric="nll"))["values"] == nll
    with pytest.raises(ValueError, match="same number"):
        curves.save_by_chunk({"a": [1.0], "b": []}, tmp_path, metric="nll")
    whole(curves.save_query_energy({"0": [[0.5, 1.0]]}, tmp_path))


def test_attention_maps_and_selected_tokens(tmp_path) -> None:
    example = {
        "cached_tokens": 12,
        "cached_bins": 2,
        "maps": {"exact": [[0.1, 0.2, 0.3]], "a": [[0.0, 0.2, 0.3]]},
        "masses": {"exact": 0.4, "a": 0.3},
        "selected": {"exact": [0, 7, 11], "a": [0, 7, 10]},
    }
    whole(attention.save_attention_maps(example, tmp_path))
    data = whole(attention.save_token_selection(example, tmp_path, rows=2, columns=3, recipe="a"))
    assert data["token_shift"] == pytest.approx(1 / 3)
    assert np.asarray(data["counts"]["a"]).shape == (2, 2, 3)
    with pytest.raises(ValueError, match="whole frames"):
        attention.save_token_selection(example, tmp_path, rows=5, columns=1, recipe="a")
    with pytest.raises(ValueError, match="'b'"):
        attention.save_token_selection(example, tmp_path, rows=2, columns=3, recipe="b")


def test_memory_bars(tmp_path) -> None:
    whole(memory.save_memory_bars({"m": {"a": 1e9, "b": 2e9}}, tmp_path, title="t"))
    with pytest.raises(ValueError, match="same recipes"):
        memory.save_memory_bars({"m": {"a": 1.0}, "n": {"b": 1.0}}, tmp_path, title="t")


def test_frames_and_differences(tmp_path) -> None:
    base = np.full((4, 24, 32, 3), 100, np.uint8)
    other = base.copy()
    other[2] = 110
    clips = {"bf16": base, "a": other}
    whole(frames.save_frames_side_by_side(clips, tmp_path, frames=[0, 2]))
    shown = frames.difference(other, base)
    assert shown[0].max() == 128 and shown[2].min() == 168
    assert frames.save_difference_video(clips, tmp_path / "d.mp4").stat().st_size > 500
    with pytest.raises(ValueError, match="frames must be"):
        frames.save_frames_side_by_side(clips, tmp_path, frames=[4])
    with pytest.raises(ValueError, match="one shape"):
        frames.difference(other[:2], base)


def test_long_rollouts_are_shown_in_fast_motion() -> None:
    from videokv.report.figures.from_folder import VIDEO_FRAMES, thinned

    short, long = np.zeros((VIDEO_FRAMES, 2)), np.zeros((702, 2))
    assert thinned({"a": short}) == ({"a": pytest.approx(short)}, 1)
    shown, step = thinned({"a": long, "b": long})
    assert step == 6 and {len(frames) for frames in shown.values()} == {117}


def test_a_recipe_has_one_colour_with_and_without_the_reference(tmp_path) -> None:
    curves.save_by_chunk({"a": [1.0], "b": [2.0]}, tmp_path, metric="psnr")
    curves.save_by_chunk({"bf16": [0.5], "a": [1.0], "b": [2.0]}, tmp_path, metric="sharpness")
    for metric in ("psnr", "sharpness"):
        drawn = (tmp_path / f"{metric}_by_chunk.svg").read_text().lower()
        assert all(colour_of(name, ["a", "b"]).lower() in drawn for name in "ab")
