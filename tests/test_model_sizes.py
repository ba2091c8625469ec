"""Bytes of real models' caches, counted from their shapes."""

from pathlib import Path

import pytest

from videokv.studies.model_sizes import MODELS, VideoModel, size_table, write_tables

PAGES = Path(__file__).parent.parent / "docs" / "models"
BY_NAME = {model.name: model for model in MODELS}


@pytest.mark.parametrize(
    "name, kilobytes",
    [
        ("Self-Forcing", 184),
        ("LingBot-World", 819),
        ("LongLive v2", 369),
        ("MAGI-1 4.5B", 139),
        ("HY-WorldPlay 8B", 885),
        ("HY-WorldPlay, Wan", 737),
        ("LongCat-Video", 786),
        ("AnyFlow-FAR", 819),
        ("SANA-WM refiner", 786),
        ("SkyReels-V2 1.3B", 184),
    ],
)
def test_bytes_of_a_token(name, kilobytes):
    assert BY_NAME[name].token_bytes() / 1000 == pytest.approx(kilobytes, abs=0.7)


def test_longcat_is_what_its_papers_count():
    """19 latent frames of 1560 tokens: 21.709 GiB in bfloat16."""
    assert BY_NAME["LongCat-Video"].dense_bytes(1560) / 2**30 == pytest.approx(21.709, abs=2e-3)


def test_held_bytes_are_dense_and_packed_parts():
    model = VideoModel("m", "p", 2, 3, 8, 10, 20, 1, 5, 1, 1)
    assert model.dense_bytes(10) == 2 * 2 * 3 * 8 * 2 * 50
    assert model.held_bytes(10, 16) == model.dense_bytes(10)
    assert model.held_bytes(10, 4) == model.dense_bytes(10) * (2 + 3 / 4) / 5
    with pytest.raises(ValueError, match="3 dense frames of 2 held"):
        VideoModel("m", "p", 2, 3, 8, 10, 20, 1, 2, 2, 1)


def test_coarse_frames_have_a_quarter_of_the_tokens():
    fine, coarse = (VideoModel("m", "p", 2, 3, 8, 8, 8, 1, 5, coarse_frames=n) for n in (0, 4))
    assert coarse.dense_bytes(8) == fine.dense_bytes(8) * 2 / 5


def test_every_page_holds_its_table(tmp_path):
    pages = {path.stem for path in PAGES.glob("*.md")}
    assert pages - {"README", "transformers"} == {model.page for model in MODELS}
    for model in MODELS:
        first, _, bf16, *_ = size_table(model, ()).split("\n")
        text = (PAGES / f"{model.page}.md").read_text()
        assert first in text and bf16 in text


def test_a_page_without_marks_is_refused(tmp_path):
    for model in MODELS:
        (tmp_path / f"{model.page}.md").write_text("# nothing")
    with pytest.raises(ValueError, match="lacks the lines"):
        write_tables(tmp_path)
